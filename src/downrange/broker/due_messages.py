"""The messages of one tick of the timer wheel, on their way from the timer topic to their real topics."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from typing import Final, NamedTuple

from downrange.broker.message_writer import MessageWriter
from downrange.broker.timed import deletion_key, delivered, rolled
from downrange.broker.timer_copies import TimerCopies
from downrange.broker.timer_metrics import TimerMetrics
from downrange.compiled import accelerated
from downrange.model import properties as names
from downrange.model.message import PhysicalOffset
from downrange.model.record import CorruptRecord
from downrange.model.topics import TIMER_TOPIC
from downrange.store.kept_message import KeptMessage, read_kept
from downrange.store.message_store import MessageStore
from downrange.store.new_message import NewMessage, PutMessageStatus, Refusal
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queues import ConsumeQueues
from downrange.store.timer.timer_index import SlotChain

log = logging.getLogger(__name__)

# The most that `DueMessages` does in one turn of the loop, because senders wait meanwhile. A usual message is one piece
# of work, and one more for each KiB; other messages take several times longer.
_TURN_UNITS: Final = 5000
_TURN_DELETES: Final = 200
_TURN_WORK: Final = 1000
_UNUSUAL_WORK: Final = 5
_BYTES_OF_WORK: Final = 1024
_HOPELESS: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class LogFile(NamedTuple):
    """A file of the log: its bytes, its offset in the log, and how much of it may be read."""

    view: memoryview
    start: int
    readable: int


class Tick(NamedTuple):
    """The tick that is being delivered, the time, and the keys of the messages that were deleted."""

    time: int
    now: int
    deleted: set[str]


@accelerated
def add_due(
    messages: NewMessages,
    units: array[int],
    at: int,
    work: int,
    file: LogFile,
    tick: Tick,
    queues: ConsumeQueues,
    fits: int,
) -> tuple[int, int]:
    """Add usual messages that are due to a batch, from unit `at - 1` down to the first that is not usual.

    Return the number of units that are left, and how much work is left: the last message may take more than there was.
    Usual is a whole record of the timer topic in this file of the log, as `Timing.set_aside` makes it and not rolled,
    for a queue that is known and not special, which is not deleted and fits the limits. This function, in Python, adds
    none: `DueMessages` does it one by one.
    """
    return at, work


class DueMessages:
    """Delivers the messages of one tick, a part in each turn of the loop.

    Holds always: a message is removed from the chain after it was stored, or when it cannot be delivered. For the
    store's own thread.
    """

    def __init__(
        self,
        store: MessageStore,
        writer: MessageWriter,
        metrics: TimerMetrics,
        chain: SlotChain,
        time: int,
        copies: TimerCopies | None,
    ) -> None:
        self._store = store
        self._writer = writer
        self._metrics = metrics
        self._chain = chain
        self._time = time
        self._copies = copies
        self._is_read = False
        self._deleted: set[str] = set()
        """The keys of the deletions in this tick."""
        self._settled: set[int] = set()
        """Offsets of records that will not be delivered, until they are removed from the chain."""

    @property
    def is_over(self) -> bool:
        chain = self._chain
        return self._is_read and not (chain.deletes or chain.rolls or chain.messages)

    def deliver(self, now: int) -> Refusal | None:
        """Do as much as one turn may. On failure say why: then the rest has to be tried again."""
        chain = self._chain
        if not self._is_read:
            self._is_read = chain.read(_TURN_UNITS)
        if self._is_read and chain.deletes:
            self._read_deletes()
        if not self._is_read or chain.deletes:
            return None
        if chain.rolls:
            return self._append(chain.rolls, now, is_roll=True)
        return self._append(chain.messages, now, is_roll=False)

    def _read_deletes(self) -> None:
        deletes = self._chain.deletes
        for _ in range(min(len(deletes), _TURN_DELETES)):
            kept = timer_record(self._store, deletes.pop())
            if kept is not None:
                topic, key = kept.find(names.REAL_TOPIC), kept.find(names.TIMER_DEL_UNIQKEY)
                if key is not None and key.startswith(f"{topic}+"):  # who may send to a topic deletes there only
                    self._deleted.add(key)

    def _append(self, units: array[int], now: int, *, is_roll: bool) -> Refusal | None:
        """Store the messages of the last units, which were put on the wheel first."""
        batch = NewMessages()
        rolled_topics: list[str] = []
        at, work = len(units) // 2, _TURN_WORK
        may_be_usual = not is_roll and self._copies is None and not self._settled
        refusal: Refusal | None = None
        while at and work > 0 and refusal is None:
            if may_be_usual:
                at, work = self._add_usual(batch, units, at, work, now)
                if not at or work <= 0:
                    break
            offset, write_time = units[2 * at - 2 : 2 * at]
            message = None if offset in self._settled else self._message(offset, write_time, now, is_roll=is_roll)
            refusal = None if message is None else self._add(batch, message, offset)
            if refusal is None:
                at -= 1
                work -= _UNUSUAL_WORK
                if message is not None:
                    work -= (len(message.body) + len(message.properties)) // _BYTES_OF_WORK
                    if is_roll and offset not in self._settled:
                        rolled_topics.append(_real_topic(message))
        if len(batch):
            refusal = self._writer.append(batch) or refusal
        stored = rolled_topics if is_roll else [state.topic for state in batch.states]
        for topic, count in Counter(stored[: batch.stored]).items():
            self._metrics.dequeued(topic, count)
        self._remove(units, at, batch.stored)
        return refusal

    def _add_usual(self, batch: NewMessages, units: array[int], at: int, work: int, now: int) -> tuple[int, int]:
        segment = self._store.commit_log.segments.find(PhysicalOffset(units[2 * at - 2]))
        if segment is None:
            return at, work
        file = LogFile(segment.view, segment.start, segment.readable)
        tick = Tick(self._time, now, self._deleted)
        return add_due(batch, units, at, work, file, tick, self._store.queues, self._store.limits.surely_fits)

    def _add(self, batch: NewMessages, message: NewMessage, offset: int) -> Refusal | None:
        """Add a message to the batch. One that can never be stored is settled; else say why it cannot be stored now."""
        refusal = self._writer.add(batch, (message,))
        if refusal is None:
            self._store.queues.of_record(message.topic.encode(), message.queue_id)  # usual messages will find it there
        elif refusal.status in _HOPELESS:
            log.error("timer message dropped topic=%s reason=%s", message.topic, refusal.reason)
            self._settle(offset, _real_topic(message))
            refusal = None
        return refusal

    def _message(self, offset: int, write_time: int, now: int, *, is_roll: bool) -> NewMessage | None:
        """A message as it is stored now.

        None when it was deleted, was delivered by an earlier run, expired before it was due, or is damaged: that is
        decided once.
        """
        kept = timer_record(self._store, offset)
        if kept is None:
            log.error("timer message dropped physical_offset=%d reason=its record is not in the log", offset)
            self._settle(offset, None)
            return None
        topic = kept.find(names.REAL_TOPIC)
        message: NewMessage | None
        if is_roll:
            message = None if self._is_copied(kept, TIMER_TOPIC, 0, is_roll=True) else rolled(kept, write_time, now)
        elif self._deleted and deletion_key(kept) in self._deleted:
            message = None
        else:
            message = delivered(kept, write_time, self._time, now)
            if message is None:
                log.error("timer message dropped physical_offset=%d reason=no real topic", offset)
            elif self._is_copied(kept, message.topic, message.queue_id, is_roll=False):
                message = None
        if message is None or topic is None:
            self._settle(offset, topic)
            return None
        return message

    def _is_copied(self, kept: KeptMessage, topic: str, queue_id: int, *, is_roll: bool) -> bool:
        return self._copies is not None and self._copies.take(kept, topic, queue_id, is_roll=is_roll)

    def _settle(self, offset: int, topic: str | None) -> None:
        self._settled.add(offset)
        if topic is not None:
            self._metrics.left(topic)

    def _remove(self, units: array[int], at: int, stored: int) -> None:
        """Remove the units behind `at` that were stored, in their order, and those between them that are settled."""
        end = len(units) // 2
        if not self._settled:
            end -= stored
        while self._settled and end > at and (stored or units[2 * end - 2] in self._settled):
            end -= 1
            stored -= units[2 * end] not in self._settled
        self._settled.difference_update(units[2 * end :: 2])
        del units[2 * end :]


def timer_record(store: MessageStore, physical_offset: int) -> KeptMessage | None:
    """A record of the timer topic; None when there is no such record at this place, any more."""
    record = store.record_at(physical_offset)
    try:
        kept = read_kept(record) if record is not None else None
    except CorruptRecord:
        return None
    return kept if kept is not None and kept.message.topic == TIMER_TOPIC else None


def _real_topic(message: NewMessage) -> str:
    found = names.find_in_bytes(message.properties, b"REAL_TOPIC")
    return "" if found is None else found.decode()
