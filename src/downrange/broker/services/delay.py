"""Delayed messages: each waits in the queue of its level until it is due, then goes to its real topic.

The messages of one level are due in the order of their arrival, so only the first of each queue is looked at. Its time
decides how long to sleep; a message that arrives in an empty queue ends the sleep. One offset per level says what was
delivered. It is saved now and then: after a crash, the last few seconds are delivered again. [ScheduleMessageService]
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from downrange.broker.delayed import delivered
from downrange.broker.json_file import JsonFile, SavedTable
from downrange.broker.message_writer import MessageWriter
from downrange.clock import Clock, sleep_or_set
from downrange.model.message import TopicQueue
from downrange.model.record import CorruptRecord
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.store.kept_message import read_kept
from downrange.store.message_reader import QueueEntry
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, Refusal
from downrange.store.new_messages import NewMessages

log = logging.getLogger(__name__)

# Most messages and bytes delivered in one turn of the loop, for which senders have to wait.
_TURN_MESSAGES: Final = 200
_TURN_BYTES: Final = 1 << 20
# Messages that are due shortly after another are delivered together, not with a wake-up for each.
_SHORTEST_PAUSE_SECONDS: Final = 0.005
# The wall clock may be set by an operator, so it is read at least this often.
_LONGEST_PAUSE_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.1
# The store keeps store times from running backwards for clocks set back by up to a minute. A message that is due later
# than now plus its delay plus that minute was stored with a wrong clock and would wait far too long.
_CLOCK_STEP_MILLIS: Final = 60_000
_FAILURES_PER_LOG_LINE: Final = 600


_Tail = dict[tuple[bytes, bytes, int, int], int]
"""What `_copied` says of messages, and where each was stored last."""


def _copied(message: NewMessage) -> tuple[bytes, bytes, int, int]:
    """What a delivered message has in common with the one in the delay topic, and with no other."""
    return message.properties, message.body, message.born_timestamp, message.reconsume_times


@dataclass(slots=True)
class DelayLevel:
    """One level and the first message that waits in its queue."""

    number: int
    delay_millis: int
    due_millis: int | None = None
    """When the first message in the queue is due; None when the queue is empty."""
    retry_at: float = 0.0
    failures: int = 0

    @property
    def queue_id(self) -> int:
        return self.number - 1

    def is_due(self, due_millis: int, now: int) -> bool:
        return due_millis <= now or due_millis > now + self.delay_millis + _CLOCK_STEP_MILLIS


class DelayService(SavedTable):
    """Delivers delayed messages: never before they are due, in the order of their level, each at least once.

    Holds always: every message before a level's offset was delivered or cannot be delivered; none from the offset on
    was. A slave keeps the offsets of its master, and does not run this.
    """

    def __init__(self, store: MessageStore, writer: MessageWriter, file: JsonFile, clock: Clock) -> None:
        super().__init__(file)
        self._store = store
        self._writer = writer
        self._clock = clock
        self._levels = [DelayLevel(number, delay) for number, delay in enumerate(store.config.delay_level_millis(), 1)]
        saved = file.load(DelayOffsets)
        # Levels that are not configured now keep their offsets: they may be configured again.
        self._offsets: dict[int, int] = dict(saved.offset_table) if saved is not None else {}
        self._wanted = asyncio.Event()
        self.on_moved: Callable[[int, int], None] = lambda level, offset: None
        """Called with a level and its offset when messages were delivered."""
        # The queues that may have a first message which was not looked at.
        self._grown = set(range(len(self._levels)))
        writer.on_delayed = self.wake
        for level in self._levels:
            self._clip(level)

    def __repr__(self) -> str:
        waiting = sum(level.due_millis is not None for level in self._levels)
        return f"<DelayService levels={len(self._levels)} waiting={waiting} offsets={self._offsets}>"

    # --- what others may ask ------------------------------------------------------------------------------------

    def table(self) -> DelayOffsets:
        """Level -> offset of the next message to deliver, as slaves get it and as it is saved."""
        return DelayOffsets(offset_table=dict(sorted(self._offsets.items())))

    def progress(self) -> dict[int, tuple[int, int]]:
        """Level -> (offset of the next message to deliver, end of its queue), for the levels that delivered any."""
        return {
            level: (offset, self._store.max_offset_of(SCHEDULE_TOPIC, level - 1))
            for level, offset in sorted(self._offsets.items())
        }

    def take_over(self, table: DelayOffsets) -> None:
        """Take the offsets of a master, so that this slave can replace it some day."""
        if self._offsets != table.offset_table:
            self._offsets = dict(table.offset_table)
            self.mark_unsaved()

    def follow(self, offsets: Mapping[int, int]) -> None:
        """Take the offsets of the levels at which a master delivered messages."""
        self._offsets.update(offsets)
        self.mark_unsaved()

    def skip_delivered(self) -> None:
        """Move past messages that the log shows as delivered, though no offset says so: a master died in between.

        Its last turn stored them at the end of the log. So they are among the last messages of their queues, and behind
        the messages in the delay topic that they were made from.
        """
        now, tails = self._clock.now(), dict[TopicQueue, _Tail]()
        for level in self._levels:
            self._clip(level)
            offset = passed = self._offsets.get(level.number, 0)
            for entry in self._store.entries(SCHEDULE_TOPIC, level.queue_id, offset, _TURN_MESSAGES):
                if not level.is_due(entry.tags_code, now):
                    break
                offset += 1
                message = self._message(level, entry)
                if message is None:
                    continue  # nothing was stored for it
                queue = TopicQueue(message.topic, message.queue_id)
                if queue not in tails:
                    tails[queue] = self._tail(queue)
                if tails[queue].get(_copied(message), -1) < entry.physical_offset:
                    break
                passed = offset
            if passed != self._offsets.get(level.number, 0):
                log.info("delayed messages were delivered by the last master level=%d offset=%d", level.number, passed)
                self._move(level, passed)

    def _tail(self, queue: TopicQueue) -> _Tail:
        """The last messages of a queue."""
        found: _Tail = {}
        first = self._store.max_offset_of(*queue) - _TURN_MESSAGES
        for entry in self._store.entries(*queue, max(first, self._store.min_offset_of(*queue)), _TURN_MESSAGES):
            record = self._store.record_at(entry.physical_offset)
            if record is not None:
                with suppress(CorruptRecord):
                    found[_copied(read_kept(record).message)] = entry.physical_offset
        return found

    def wake(self, queue_id: int, due_millis: int | None) -> None:
        """A message was put into a queue of the delay topic; None when it is not known when it is due."""
        # Behind another one it cannot be due earlier: then the sleep is right as it is.
        if queue_id < len(self._levels) and self._levels[queue_id].due_millis is None:
            self._levels[queue_id].due_millis = due_millis
            if due_millis is None:
                self._grown.add(queue_id)
            self._wanted.set()

    # --- running ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver for as long as the broker is a master; another service saves the offsets."""
        for level in self._levels:  # so that the first sender of a delayed message does not wait for its queue
            self._store.queues.get_or_make(SCHEDULE_TOPIC, level.queue_id).queue.get_ready()
            level.due_millis, level.retry_at, level.failures = None, 0.0, 0
        self._grown = set(range(len(self._levels)))  # a slave did not look at them
        while True:
            self._wanted.clear()
            seconds = self.deliver()
            if seconds > 0:
                await sleep_or_set(self._clock, seconds, self._wanted)
            else:
                await asyncio.sleep(0)

    # --- delivering ---------------------------------------------------------------------------------------------

    def deliver(self) -> float:
        """Deliver messages that are due, as many as one turn may; return the seconds until more are due."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        while self._grown:
            self._look_at_first(self._levels[self._grown.pop()])
        ready = [level for level, seconds in self._waits(now, monotonic) if seconds <= 0]
        for level in ready:
            self._deliver_level(level, now, _TURN_MESSAGES // len(ready), _TURN_BYTES // len(ready))
        soonest = min([seconds for _, seconds in self._waits(now, monotonic)], default=_LONGEST_PAUSE_SECONDS)
        return 0.0 if soonest <= 0 else min(max(soonest, _SHORTEST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)

    def _waits(self, now: int, monotonic: float) -> list[tuple[DelayLevel, float]]:
        """The levels that have messages, each with the seconds until its first one is due."""
        return [
            (level, max(0.0 if level.is_due(due, now) else (due - now) / 1000, level.retry_at - monotonic))
            for level in self._levels
            if (due := level.due_millis) is not None
        ]

    def _deliver_level(self, level: DelayLevel, now: int, max_messages: int, max_bytes: int) -> None:
        offset = self._offsets.get(level.number, 0)
        messages: list[NewMessage | None] = []
        for entry in self._store.entries(SCHEDULE_TOPIC, level.queue_id, offset, max(1, max_messages)):
            if max_bytes <= 0 or not level.is_due(entry.tags_code, now):
                break
            messages.append(self._message(level, entry))
            max_bytes -= entry.size
        delivered = self._deliver(level, messages)
        if delivered:
            self._move(level, offset + delivered)
            self.on_moved(level.number, offset + delivered)
        if delivered < len(messages):
            level.retry_at = self._clock.monotonic() + _RETRY_SECONDS
        self._look_at_first(level)

    def _message(self, level: DelayLevel, entry: QueueEntry) -> NewMessage | None:
        """The message to deliver; None if it expired before it was due, or is damaged."""
        record = self._store.record_at(entry.physical_offset)
        try:
            message = delivered(read_kept(record)) if record is not None else None
        except CorruptRecord:
            message = None
        if message is None:
            log.error("delayed message dropped level=%d physical_offset=%d", level.number, entry.physical_offset)
        return message

    def _deliver(self, level: DelayLevel, messages: list[NewMessage | None]) -> int:
        """Put messages into their real topics, up to the first that cannot be stored now; how many that were."""
        batch = NewMessages()
        refusal: Refusal | None = None
        numbers: list[int] = []  # of those in the batch
        for number, message in enumerate(messages):
            if message is not None:
                refusal = self._writer.add(batch, (message,))
                if refusal is not None:
                    break
                numbers.append(number)
        if numbers:
            refusal = self._writer.append(batch) or refusal
        if refusal is None:
            level.failures = 0
            return len(messages)
        failed = numbers[batch.stored] if batch.stored < len(numbers) else number
        if level.failures % _FAILURES_PER_LOG_LINE == 0:
            message = messages[failed]
            log.error(
                "delayed message cannot be delivered, trying on level=%d topic=%s status=%s reason=%s",
                level.number, message.topic if message else "", refusal.status.value, refusal.reason,
            )  # fmt: skip
        level.failures += 1
        return failed

    def _look_at_first(self, level: DelayLevel) -> None:
        self._clip(level)
        first = self._store.entries(SCHEDULE_TOPIC, level.queue_id, self._offsets.get(level.number, 0), 1)
        level.due_millis = first[0].tags_code if first else None

    def _clip(self, level: DelayLevel) -> None:
        """Move the offset into its queue, whose first files may have expired and whose end a recovery may have cut."""
        offset = self._offsets.get(level.number, 0)
        lowest = self._store.min_offset_of(SCHEDULE_TOPIC, level.queue_id)
        highest = self._store.max_offset_of(SCHEDULE_TOPIC, level.queue_id)
        if not lowest <= offset <= highest:
            log.warning("delay offset corrected level=%d from=%d to=%d..%d", level.number, offset, lowest, highest)
            self._move(level, max(lowest, min(offset, highest)))

    def _move(self, level: DelayLevel, offset: int) -> None:
        self._offsets[level.number] = offset
        self.mark_unsaved()
