"""The reading half of a store: by queue, by key, by time, by place in the log. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.record import CorruptRecord
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.errors import StoreClosed
from downrange.store.index.key_index import KeyIndex
from downrange.store.kept_message import read_kept
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.segment import Segment
from downrange.store.queue.backlog import Backlog, Picked, pick_all
from downrange.store.queue.consume_queue import ENTRY, ENTRY_SIZE, ConsumeQueue
from downrange.store.queue.consume_queue_ext import ConsumeQueueExt, ExtUnit, UnitTest
from downrange.store.queue.property_filter import PropertyFilter
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.queue.tag_codes import TagCodes
from downrange.store.queue.unread import Unread, take_unread
from downrange.store.read_result import GetMessageStatus, QueryResult, ReadResult

_FIRST: Final = QueueOffset(0)
_FOUND: Final = GetMessageStatus.FOUND
_SCAN_ENTRIES: Final = 800
_QUERY_ROUNDS: Final = 3
_BULK_MESSAGES: Final = 4096
# Reading from the disk holds everybody up: a bulk read of old messages takes no more than this at a time.
_COLD_BULK_BYTES: Final = 1 << 20

# tags code (None: unknown) and ext unit, if any, of a queue entry -> may the message match?
MatchesEntry = Callable[[int | None, ExtUnit | None], bool]
MatchesRecord = Callable[[memoryview], bool]
# Which of many entries a reader wants, the most entries and bytes of one reply given; None: look at them one by one.
Pick = Callable[[Backlog, int, int], Picked | None]


class QueueEntry(NamedTuple):
    """One entry of a consume queue: where a message lies, and its tag hash (in a delay queue: when it is due)."""

    physical_offset: PhysicalOffset
    size: int
    tags_code: int


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class MessageReader:
    """Everything that can be asked of a store. No answer is decoded: records come as they lie in the log.

    One thread reads, the one that also appends.
    """

    def __init__(
        self, config: StoreConfig, commit_log: CommitLog, queues: ConsumeQueues, index: KeyIndex | None
    ) -> None:
        self.config = config
        self.commit_log = commit_log
        self.queues = queues
        self.index = index
        self._states = queues.states
        self._segments = commit_log.segments
        self.memory_limit = physical_memory() * config.access_message_in_memory_max_ratio // 100
        """The number of bytes at the end of the log that count as still in memory."""
        self._closed: str | None = "the store is not open"

    def _check_open(self) -> None:
        if self._closed is not None:
            raise StoreClosed(self._closed)

    @property
    def min_offset(self) -> PhysicalOffset:
        return self.commit_log.min_offset

    @property
    def max_offset(self) -> PhysicalOffset:
        return self.commit_log.max_offset

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int,
        *,
        matches: MatchesEntry | None = None,
        matches_record: MatchesRecord | None = None,
        bulk_bytes: int = 0,
    ) -> ReadResult:
        """Records of one queue from `offset` on: at most `max_messages`, and no more than the transfer limits allow.

        `bulk_bytes`, if given, is the limit instead of those: the reader is known to take many records at a time.
        """
        self._check_open()
        offset = QueueOffset(offset)
        state = self._states.get((topic, queue_id))
        if state is None:
            return ReadResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, self._corrected(_FIRST, offset), _FIRST, _FIRST)
        queue = state.queue
        min_offset, max_offset = queue.min_offset, queue.max_offset
        if min_offset <= offset < max_offset:
            if bulk_bytes and max_messages > _BULK_MESSAGES:
                max_messages = _BULK_MESSAGES
            pick = _pick_of(state, matches, matches_record)
            if pick is not None:
                found = self._read_at_once(queue, offset, max_messages, pick, bulk_bytes, min_offset, max_offset)
                if found is not None:
                    return found
            raw = queue.read(offset, max(_SCAN_ENTRIES, max_messages))
            if raw:
                return self._read_one_by_one(state, offset, raw, max_messages, matches, matches_record, bulk_bytes)
            status = GetMessageStatus.OFFSET_FOUND_NULL
            position = self._corrected(queue.next_file_offset(offset), offset)
        elif max_offset < offset <= state.next_offset:
            # Messages that have their numbers and cannot be read yet: not committed by the transient pool, or not
            # confirmed. Who has read them elsewhere must not be sent back.
            status, position = GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
        elif max_offset == 0:
            status, position = GetMessageStatus.NO_MESSAGE_IN_QUEUE, self._corrected(_FIRST, offset)
        elif offset < min_offset:
            status, position = GetMessageStatus.OFFSET_TOO_SMALL, self._corrected(min_offset, offset)
        elif offset == max_offset:
            status, position = GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
        else:
            status, position = GetMessageStatus.OFFSET_OVERFLOW_BADLY, self._corrected(max_offset, offset)
        return ReadResult(status, position, min_offset, max_offset)

    def take_unread(
        self, topic: str, queues: int, offsets: dict[int, int], turns: tuple[int, int], most: int
    ) -> tuple[list[Unread], Segment | None]:
        """Take messages that a group has not read, for several readers: see the step of this name in `queue/unread.py`.

        Beside what was taken the file of the log that all of their records lie in: the last one.
        """
        self._check_open()
        log_file, tails, config = self._segments.last, self.queues.tails, self.config
        if log_file is None or not tails.rows:
            return [], None
        end = log_file.start + log_file.readable
        most = min(most, config.max_transfer_count_on_message_in_memory)
        readable = max(log_file.start, end - self.memory_limit), end, config.max_transfer_bytes_on_message_in_memory
        found = take_unread(self._states, tails.rows, tails.memory, topic, queues, offsets, turns, most, readable)
        return found, log_file

    def _limits(self, max_messages: int, bulk_bytes: int, is_cold: bool) -> tuple[int, int]:
        """The most messages and bytes of one reply; cold messages are no longer in memory."""
        config = self.config
        if bulk_bytes:
            most, most_bytes = max_messages, min(bulk_bytes, _COLD_BULK_BYTES) if is_cold else bulk_bytes
        elif is_cold:
            most = config.max_transfer_count_on_message_in_disk
            most_bytes = config.max_transfer_bytes_on_message_in_disk
        else:
            most = config.max_transfer_count_on_message_in_memory
            most_bytes = config.max_transfer_bytes_on_message_in_memory
        if max_messages < most:
            most = max_messages
        return (most if most > 0 else 1), most_bytes

    def _read_at_once(
        self,
        queue: ConsumeQueue,
        offset: QueueOffset,
        max_messages: int,
        pick: Pick,
        bulk_bytes: int,
        min_offset: QueueOffset,
        max_offset: QueueOffset,
    ) -> ReadResult | None:
        """`read` where all records lie in one file of the log and have the same limits; None when they do not."""
        most, most_bytes = self._limits(max_messages, bulk_bytes, False)
        raw = queue.read(offset, most if pick is pick_all else max(_SCAN_ENTRIES, max_messages))
        if not raw:
            return None
        first: PhysicalOffset = ENTRY.unpack_from(raw)[0]
        segments = self._segments
        segment = segments.find(first)
        if segment is None:
            return None
        hot_from = segments.max_offset - self.memory_limit
        is_cold = first < hot_from
        if is_cold:
            most, most_bytes = self._limits(max_messages, bulk_bytes, True)
            if pick is pick_all:
                raw = queue.read(offset, most + 1)
        view, start, readable = segment.view, segment.start, segment.readable
        picked = pick((raw, view, start, readable), most, most_bytes)
        if picked is None:
            return None
        entries, scanned, byte_count = picked
        if is_cold:
            # Other limits are those of recent messages. Neither the last one may be recent nor the one behind it.
            last = scanned * ENTRY_SIZE - ENTRY_SIZE
            for at in (last, last + ENTRY_SIZE):
                if int.from_bytes(raw[at : at + 8], "big") >= hot_from:
                    return None
        return ReadResult(
            _FOUND if entries else GetMessageStatus.NO_MATCHED_MESSAGE,
            offset + scanned,  # type: ignore[arg-type]  # a NewType is called at runtime, too
            min_offset,
            max_offset,
            (entries, view, start, readable) if entries else [],
            len(entries) // ENTRY_SIZE,
            byte_count,
            is_cold,
        )

    def _read_one_by_one(
        self,
        state: QueueState,
        offset: QueueOffset,
        raw: bytes,
        max_messages: int,
        matches: MatchesEntry | None,
        matches_record: MatchesRecord | None,
        bulk_bytes: int,
    ) -> ReadResult:
        """`read` for any entries: in several files, with units, removed already, tested by any function."""
        find = self._segments.find
        log_max = self.commit_log.max_offset
        hot_from = log_max - self.memory_limit
        hot_count, hot_bytes = self._limits(max_messages, bulk_bytes, False)
        cold_count, cold_bytes = self._limits(max_messages, bulk_bytes, True)

        status = GetMessageStatus.NO_MATCHED_MESSAGE
        slices: list[memoryview] = []
        count = byte_count = scanned = 0
        skip_below = physical_offset = -1
        # The current run of records that lie next to each other: [run_at, run_end) of `view`, a file from `start` on.
        view: memoryview | None = None
        start = readable = run_at = run_end = 0
        for physical_offset, size, code in ENTRY.iter_unpack(raw):
            if physical_offset < skip_below:
                scanned += 1
                continue
            if count:
                if physical_offset >= hot_from:
                    if count >= hot_count or byte_count + size > hot_bytes:
                        break
                elif count >= cold_count or byte_count + size > cold_bytes:
                    break
            scanned += 1
            if matches is not None:
                unit = None
                known: int | None = code
                if state.ext is not None and ConsumeQueueExt.is_ext_address(code):
                    unit = state.ext.get(code)
                    known = unit.tags_code if unit is not None else None
                if not matches(known, unit):
                    continue
            at = physical_offset - start
            if view is None or not 0 <= at < readable or at + size > readable:
                if run_end > run_at and view is not None:
                    slices.append(view[run_at:run_end])
                run_at = run_end = 0
                view = None
                segment = find(physical_offset)
                if segment is not None and physical_offset - segment.start + size <= segment.readable:
                    view, start, readable = segment.view, segment.start, segment.readable
                    at = physical_offset - start
                else:
                    if not count:
                        status = GetMessageStatus.MESSAGE_WAS_REMOVING
                    skip_below = self.commit_log.next_file_offset(physical_offset)
                    continue
            if matches_record is not None and not matches_record(view[at : at + size]):
                if not count:
                    status = GetMessageStatus.NO_MATCHED_MESSAGE
                continue
            if at != run_end:
                if run_end > run_at:
                    slices.append(view[run_at:run_end])
                run_at = at
            run_end = at + size
            count += 1
            byte_count += size
        if run_end > run_at and view is not None:
            slices.append(view[run_at:run_end])
        return ReadResult(
            GetMessageStatus.FOUND if count else status,
            QueueOffset(offset + scanned),
            state.queue.min_offset,
            state.queue.max_offset,
            slices,
            count,
            byte_count,
            log_max - physical_offset > self.memory_limit,
        )

    def _corrected(self, right: QueueOffset, requested: QueueOffset) -> QueueOffset:
        """The offset that a consumer is told to go on from. A slave may lag behind its master: it repeats the requested
        offset, unless offsetCheckInSlave is set."""
        if self.config.broker_role is BrokerRole.SLAVE and not self.config.offset_check_in_slave:
            return requested
        return right

    def min_offset_of(self, topic: str, queue_id: int) -> QueueOffset:
        state = self._states.get((topic, queue_id))
        return state.queue.min_offset if state is not None else _FIRST

    def max_offset_of(self, topic: str, queue_id: int) -> QueueOffset:
        state = self._states.get((topic, queue_id))
        return state.queue.max_offset if state is not None else _FIRST

    def physical_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> PhysicalOffset:
        """Where the message with this queue offset lies in the log; -1 when the queue has no such entry."""
        state = self._states.get((topic, queue_id))
        raw = state.queue.read(QueueOffset(queue_offset), 1) if state is not None else b""
        return ENTRY.unpack(raw)[0] if raw else PhysicalOffset(-1)

    def entries(self, topic: str, queue_id: int, offset: int, max_entries: int) -> list[QueueEntry]:
        """Some entries of a queue from `offset` on, without their messages; none when `offset` lies outside of it."""
        state = self._states.get((topic, queue_id))
        if state is None:
            return []
        found = [QueueEntry(*entry) for entry in ENTRY.iter_unpack(state.queue.read(QueueOffset(offset), max_entries))]
        if state.ext is not None:
            for number, (physical_offset, size, code) in enumerate(found):
                unit = state.ext.get(code) if ConsumeQueueExt.is_ext_address(code) else None
                if unit is not None:
                    found[number] = QueueEntry(physical_offset, size, unit.tags_code)
        return found

    def backlog(self, topic: str, queue_id: int, offset: int, max_entries: int) -> Backlog | None:
        """Some entries of a queue from `offset` on, and the file of the log that the first record lies in.

        None when there is no entry, or the file is gone.
        """
        state = self._states.get((topic, queue_id))
        raw = state.queue.read(QueueOffset(offset), max_entries) if state is not None else b""
        segment = self._segments.find(ENTRY.unpack_from(raw)[0]) if raw else None
        return None if segment is None else (raw, segment.view, segment.start, segment.readable)

    def is_beyond_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Does this message lie so far back in the log that memory is unlikely to hold it? No when it is not there."""
        physical_offset = self.physical_offset_of(topic, queue_id, queue_offset)
        return physical_offset >= 0 and self.commit_log.max_offset - physical_offset > self.memory_limit

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Store time of one message; -1 when it is not there."""
        physical_offset = self.physical_offset_of(topic, queue_id, queue_offset)
        return self.commit_log.store_timestamp_at(physical_offset) if physical_offset >= 0 else -1

    def earliest_store_time_of(self, topic: str, queue_id: int) -> int:
        return self.store_time_of(topic, queue_id, self.min_offset_of(topic, queue_id))

    @property
    def earliest_store_time(self) -> int:
        """Store time of the oldest message of all; -1 when there is none."""
        is_empty = not 0 <= self.min_offset < self.commit_log.max_offset
        return -1 if is_empty else self.commit_log.store_timestamp_at(self.min_offset)

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int) -> QueueOffset:
        """The queue offset of the message stored nearest to `timestamp`."""
        self._check_open()
        state = self._states.get((topic, queue_id))
        if state is None:
            return _FIRST
        return state.queue.search_by_time(timestamp, self.min_offset, self.commit_log.store_timestamp_at)

    def record_at(self, physical_offset: int) -> memoryview | None:
        """The record that begins at this offset of the log, or None."""
        self._check_open()
        return self.commit_log.record_at(PhysicalOffset(physical_offset))

    def query(self, topic: str, key: str, max_messages: int, begin: int, end: int) -> QueryResult:
        """Records of a topic whose key has the hash of this one, stored from `begin` to `end`.

        The caller compares the texts of the keys.
        The hash is over topic and key, and easy to hit with another topic: records of other topics are left out.
        """
        self._check_open()
        if self.index is None:
            return QueryResult([], 0, PhysicalOffset(0))
        timestamp, physical_offset = 0, PhysicalOffset(0)
        wanted = min(max_messages, self.config.max_msgs_num_batch)
        for _ in range(_QUERY_ROUNDS):
            found = self.index.query(topic, key, wanted, begin, end)
            timestamp, physical_offset = found.last_update_timestamp, found.last_update_physical_offset
            offsets = sorted(set(found.physical_offsets))
            if not offsets:
                break
            found_records = map(self.commit_log.record_at, offsets)
            records = [record for record in found_records if record is not None and _is_of(record, topic)]
            if records:
                return QueryResult(records, timestamp, physical_offset)
            # Everything found is gone already, or of other topics: look further back.
            end = self.commit_log.store_timestamp_at(offsets[0])
            if end < begin:
                break
        return QueryResult([], timestamp, physical_offset)


def _is_of(record: memoryview, topic: str) -> bool:
    try:
        return read_kept(record).message.topic == topic
    except CorruptRecord:
        return False


def _pick_of(state: QueueState, matches: MatchesEntry | None, matches_record: MatchesRecord | None) -> Pick | None:
    """One function that applies both tests to many entries at once; None where messages are tested one by one."""
    if matches is None and matches_record is None:
        return pick_all
    if state.ext is not None:
        return None
    if matches_record is None:
        return matches.pick if isinstance(matches, TagCodes) else None
    if isinstance(matches_record, PropertyFilter) and (matches is None or isinstance(matches, UnitTest)):
        return matches_record.pick
    return None
