"""Timer messages: each waits in the timer topic until its own time, then goes to its real topic. [TimerMessageStore]

Two things are done by turns. Taking in: records that are new in the timer topic get their places in the index
(`store/timer/`). Delivering: ticks that are over are gone through in their order, deletions first. How far both are is
saved about once a second, and never beyond what the log has on disk; what a crash leaves out is found in the log again
(`broker/timer_copies.py`). A slave takes in and does not deliver.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from downrange.broker.due_messages import DueMessages, timer_record
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.timer_copies import TimerCopies
from downrange.broker.timer_metrics import TimerMetrics
from downrange.clock import Clock
from downrange.model.hashing import java_hash
from downrange.model.properties import find_in_bytes
from downrange.model.record import CorruptRecord
from downrange.model.topics import TIMER_TOPIC
from downrange.store.config import BrokerRole
from downrange.store.errors import StoreError
from downrange.store.kept_message import read_kept
from downrange.store.message_reader import QueueEntry
from downrange.store.message_store import MessageStore
from downrange.store.timer.timed_records import timed_records
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.store.timer.timer_index import TimedRecord, TimerIndex, TimerTopic

log = logging.getLogger(__name__)

# The most that the timer itself does in one turn of the loop; `DueMessages` has limits of its own.
_TURN_TAKEN: Final = 400
_TURN_TICKS: Final = 20_000
_BUSY_PAUSE_SECONDS: Final = 0.1
_RETRY_SECONDS: Final = 0.1
_CLEAN_MILLIS: Final = 30_000
_FAILURES_PER_LOG_LINE: Final = 600


class TimerService:
    """Delivers timer messages: never before their time, less than two ticks late, each once.

    Holds always: what is due before `read_time` of the index was delivered, deleted, or cannot be delivered.
    """

    def __init__(
        self,
        store: MessageStore,
        writer: MessageWriter,
        metrics: TimerMetrics,
        config: LiveConfig,
        clock: Clock,
        index: TimerIndex | None = None,
    ) -> None:
        self._store = store
        self._writer = writer
        self._config = config
        self._clock = clock
        self.metrics = metrics
        self.index = index or TimerIndex(store.config)
        self._retry_at = 0.0
        self._failures = 0
        self._clean_at = 0
        self._unsafe: tuple[TimerCheckpoint, int] | None = None
        """A checkpoint that is true once the log is on disk up to an offset."""
        self._saved: TimerCheckpoint | None = None
        self._is_changed = False
        """Whether something was taken in or delivered that no checkpoint knows of."""
        now = clock.now()
        self.index.load(self._topic(), now, is_intact=store.recovery.is_intact)
        self._slot: DueMessages | None = None
        self.begin_delivery()

    def __repr__(self) -> str:
        return f"<TimerService {self.index!r}>"

    def begin_delivery(self) -> None:
        """Called at the start and when a slave becomes master: what was delivered before is not delivered again."""
        self._slot = None
        self._copies: TimerCopies | None = TimerCopies(self._store, self.index.redelivered_from)
        self._copies_until = self._clock.now() + 1  # what is due later cannot have been delivered before

    def _topic(self) -> TimerTopic:
        store = self._store
        return TimerTopic(
            store.min_offset_of(TIMER_TOPIC, 0),
            store.max_offset_of(TIMER_TOPIC, 0),
            store.max_offset,
            store.earliest_store_time_of(TIMER_TOPIC, 0),
            self._queue_offset_at,
        )

    def _queue_offset_at(self, physical_offset: int) -> int | None:
        kept = timer_record(self._store, physical_offset)
        return None if kept is None else kept.queue_offset

    # --- what others may ask ------------------------------------------------------------------------------------

    def count_at(self, time: int) -> int:
        """How many messages wait for the tick of a time."""
        return self.index.count_at(time)

    @property
    def enqueue_behind(self) -> int:
        """How many messages of the timer topic are not in the index yet."""
        return max(0, self._store.max_offset_of(TIMER_TOPIC, 0) - self.index.queue_offset)

    @property
    def enqueue_behind_millis(self) -> int:
        """How long ago the first of these was stored."""
        if not self.enqueue_behind:
            return 0
        return max(0, self._clock.now() - self._store.store_time_of(TIMER_TOPIC, 0, self.index.queue_offset))

    def count_within(self, seconds: int) -> int:
        """How many messages are due within this time."""
        now, precision = self._clock.now(), self.index.precision
        return self.index.wheel.count_between(now // precision, (now + seconds * 1000) // precision + 1)

    def count_overdue(self) -> int:
        """How many messages wait for ticks that are over."""
        precision = self.index.precision
        return self.index.wheel.count_between(self.index.read_time // precision, self._clock.now() // precision)

    @property
    def read_behind_millis(self) -> int:
        """How late the next tick to deliver is."""
        now = self.index.floor(self._clock.now())
        return max(0, now - self.index.next_time(now))

    def checkpoint(self) -> TimerCheckpoint:
        """How far taking in and delivering are, as slaves get it: what was saved last."""
        return self._saved or self.index.checkpoint(self._clock.now())

    def follow(self, master: TimerCheckpoint) -> None:
        """A slave learns how far its master is, so that it can replace the master some day."""
        self.index.follow(master)

    def truncated(self, end_offset: int) -> None:
        """The log was cut at `end_offset`. If timer messages were cut off, the index is made again without them."""
        topic = self._topic()
        if topic.max_offset < self.index.queue_offset:
            log.warning("timer index is made again, the log was cut offset=%d", end_offset)
            self._slot = None
            self.index.make_again(topic)
            self._unsafe = None
            self._is_changed = True

    def runtime_info(self) -> dict[str, str]:
        """The keys of request 28."""
        waiting = self.metrics.waiting
        return {
            "timerReadBehind": str(self.read_behind_millis // 1000),
            "timerOffsetBehind": str(self.enqueue_behind),
            "timerCongestNum": str(waiting),
            "timerEnqueueTps": f"{self.metrics.enqueue_rate():.1f}",
            "timerDequeueTps": f"{self.metrics.dequeue_rate():.1f}",
        }

    # --- running ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take in and deliver, for ever."""
        while True:
            seconds = self.turn()
            if seconds > 0:
                await self._clock.sleep(seconds)
            else:
                await asyncio.sleep(0)

    async def save_for_ever(self) -> None:
        """Save how far taking in and delivering are, every timerFlushIntervalMs."""
        while True:
            await self._clock.sleep(self._config.store.timer_flush_interval_ms / 1000)
            self.metrics.sample()
            write = self.prepare_save()
            if write is not None:
                await asyncio.to_thread(write)
            now = self._clock.now()
            if now >= self._clean_at:
                self._clean_at = now + _CLEAN_MILLIS
                self.index.remove_expired(self._store.min_offset)

    def close(self) -> None:
        """Save everything. The store must be open still."""
        try:
            self._store.flush_commit_log()
        except StoreError as error:
            log.error("progress of timer messages was not saved: %s", error)
            return
        if self._saved is not None or self.index.queue_offset:
            self.metrics.mark_changed()
            self._flush(self.index.checkpoint(self._clock.now()), self.metrics.prepare_save())

    def prepare_save(self) -> Callable[[], None] | None:
        """A function that saves how far taking in and delivering are, in any thread; None when that must wait."""
        checkpoint = self._safe_checkpoint()
        return None if checkpoint is None else partial(self._flush, checkpoint, self.metrics.prepare_save())

    def _safe_checkpoint(self) -> TimerCheckpoint | None:
        """A checkpoint that may be written: the log is on disk as far as the checkpoint knows it."""
        store = self._store
        safe = None
        if self._unsafe is not None and store.flushed_offset >= self._unsafe[1]:
            safe, self._unsafe = self._unsafe[0], None
        if self._unsafe is None and self._is_changed:
            self._is_changed = False
            self.metrics.mark_changed()
            checkpoint = self.index.checkpoint(self._clock.now())
            end = store.commit_log.wrote_offset
            if store.flushed_offset >= end:
                return checkpoint
            self._unsafe = checkpoint, end
        return safe

    def _flush(self, checkpoint: TimerCheckpoint, save_metrics: Callable[[], None] | None) -> None:
        try:
            self.index.flush(checkpoint)
            self._saved = checkpoint
            if save_metrics is not None:
                save_metrics()
        except OSError as error:
            log.error("progress of timer messages cannot be saved, trying on: %s", error)
            self._is_changed = True

    def turn(self) -> float:
        """Take in and deliver as much as one turn of the loop may; the seconds until there is more to do."""
        if self._clock.monotonic() < self._retry_at:
            return _RETRY_SECONDS
        now, store = self._clock.now(), self._config.store
        taken = 0 if store.timer_stop_enqueue or not self.enqueue_behind else self._take_in()
        has_more = False
        if store.broker_role is not BrokerRole.SLAVE and not store.timer_stop_dequeue:
            has_more = self._deliver(now)
        if has_more or (taken and self.enqueue_behind):
            return 0.0
        to_next_tick = (self.index.precision - now % self.index.precision) / 1000
        return min(to_next_tick, _BUSY_PAUSE_SECONDS) if taken or self.enqueue_behind else to_next_tick

    # --- taking in ----------------------------------------------------------------------------------------------

    def _take_in(self) -> int:
        """Put new records of the timer topic into the index; how many."""
        index = self.index
        # The slot that is being delivered is closed: its units have been read.
        earliest = index.read_time + (index.precision if self._slot is not None else 0)
        begun = index.queue_offset
        try:
            while (left := begun + _TURN_TAKEN - index.queue_offset) > 0:
                if not self._take_usual(earliest, left) and not self._take_one(earliest):
                    break
        except OSError as error:
            self._retry(f"timer messages cannot be put on the wheel, trying on: {error}")
        taken = index.queue_offset - begun
        if taken:
            self._is_changed = True
        return taken

    def _take_usual(self, earliest: int, most: int) -> bool:
        """Put records into the index, up to the first that is unusual; whether there were any."""
        index = self.index
        begun = index.queue_offset
        backlog = self._store.backlog(TIMER_TOPIC, 0, begun, most)
        records = timed_records(backlog) if backlog is not None else []
        if not records:
            return False
        try:
            index.put_each(records, earliest)
        finally:
            put = records[: index.queue_offset - begun]
            for topic, count in Counter([topic for *_, is_delete, topic in put if not is_delete]).items():
                self.metrics.enqueued(topic, count)
        return bool(put)

    def _take_one(self, earliest: int) -> bool:
        """Put any record into the index, or drop it if it cannot be read; whether there was one, and room for it."""
        index = self.index
        entries = self._store.entries(TIMER_TOPIC, 0, index.queue_offset, 1)
        if not entries:
            return False
        found = self._timed_record(entries[0])
        if found is None:
            log.error("timer message dropped physical_offset=%d reason=not readable", entries[0].physical_offset)
            index.queue_offset += 1
            return True
        topic, record = found
        if not index.put(record, earliest):
            return False
        if not record.is_delete:
            self.metrics.enqueued(topic)
        return True

    def _timed_record(self, entry: QueueEntry) -> tuple[str, TimedRecord] | None:
        """What the index keeps of a record, and its real topic."""
        record = self._store.record_at(entry.physical_offset)
        try:
            kept = read_kept(record) if record is not None else None
        except CorruptRecord:
            kept = None
        if kept is None:
            return None
        text = kept.message.properties
        out_time, topic = find_in_bytes(text, b"TIMER_OUT_MS"), find_in_bytes(text, b"REAL_TOPIC")
        if out_time is None or topic is None or not out_time.isdigit():
            return None
        name = topic.decode()
        return name, TimedRecord(
            int(out_time),
            kept.store_timestamp,
            entry.physical_offset,
            entry.size,
            java_hash(name),
            b"TIMER_DEL_UNIQKEY" in text and find_in_bytes(text, b"TIMER_DEL_UNIQKEY") is not None,
        )

    # --- delivering ---------------------------------------------------------------------------------------------

    def _deliver(self, now: int) -> bool:
        """Deliver what is due, as much as one turn may; whether there is more."""
        index = self.index
        floor = index.floor(now)
        if index.read_time >= floor:
            return False
        if self._slot is None:
            index.read_time = index.next_time(min(floor, index.read_time + _TURN_TICKS * index.precision))
            if index.read_time >= floor:
                return False
            chain = index.chain(index.read_time)
            if chain is None:
                return True
            if not self._is_taken_in(index.read_time + index.precision):
                return False  # messages that are not in the index yet may be due in this tick
            if index.read_time > self._copies_until:
                self._copies = None
            self._slot = DueMessages(self._store, self._writer, self.metrics, chain, index.read_time, self._copies)
        self._is_changed = True
        refusal = self._slot.deliver(now)
        if refusal is not None:
            self._retry(f"timer messages cannot be delivered, trying on: {refusal.status.value} {refusal.reason}")
            return False
        self._failures = 0
        if self._slot.is_over:
            self._slot = None
            index.read_time += index.precision
        return True

    def _is_taken_in(self, time: int) -> bool:
        """Whether the index has all messages that were stored before this time."""
        if not self.enqueue_behind or self._config.store.timer_stop_enqueue:
            return True
        return self._store.store_time_of(TIMER_TOPIC, 0, self.index.queue_offset) >= time

    def _retry(self, reason: str) -> None:
        if self._failures % _FAILURES_PER_LOG_LINE == 0:
            log.error("%s", reason)
        self._failures += 1
        self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
