"""The reading half of a store: by queue, by key, by time, by place in the log. Changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from downrange.model.message import PhysicalOffset
from downrange.model.message_id import parse_offset_message_id
from downrange.store.config import BrokerRole, StoreConfig
from downrange.store.errors import StoreClosed
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.commit_log import CommitLog
from downrange.store.queue.backlog import Backlog, records_of
from downrange.store.queue.consume_queue import ENTRY, ENTRY_SIZE
from downrange.store.queue.consume_queue_ext import ConsumeQueueExt, ExtUnit, UnitTest
from downrange.store.queue.property_filter import PropertyFilter
from downrange.store.queue.queues import ConsumeQueues, QueueState
from downrange.store.queue.tag_codes import TagCodes
from downrange.store.read_result import GetMessageStatus, QueryResult, ReadResult

_SCAN_ENTRIES: Final = 800
_QUERY_ROUNDS: Final = 3
_COPY_PIECES_BELOW: Final = 8 * 1024
_BULK_MESSAGES: Final = 4096
# Reading from the disk holds everybody up: a bulk read of old messages takes no more than this at a time.
_COLD_BULK_BYTES: Final = 1 << 20

# tags code (None: unknown) and ext unit, if any, of a queue entry -> may the message match?
MatchesEntry = Callable[[int | None, ExtUnit | None], bool]
MatchesRecord = Callable[[memoryview], bool]
# A test that can pick what passes it out of many entries at once, where they have no units.
Picker = TagCodes | PropertyFilter
# A backlog, how many entries were looked at for it, and whether its messages are no longer in memory.
FoundBacklog = tuple[Backlog, int, bool]


class QueueEntry(NamedTuple):
    """One entry of a consume queue: where a message lies, and its tag hash (in a delay queue: when it is due)."""

    physical_offset: int
    size: int
    tags_code: int


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class MessageReader:
    """Everything that can be asked of a store. No answer is decoded: records come as they lie in the log.

    One thread reads, the one that also appends.
    """

    def __init__(
        self,
        config: StoreConfig,
        commit_log: CommitLog,
        queues: ConsumeQueues,
        index: KeyIndex | None,
        memory_bytes: int | None = None,
    ) -> None:
        self.config = config
        self.commit_log = commit_log
        self.queues = queues
        self.index = index
        self._states = queues.states
        self._segments = commit_log.segments
        memory = physical_memory() if memory_bytes is None else memory_bytes
        self._memory_limit = memory * config.access_message_in_memory_max_ratio // 100
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
        state = self._states.get((topic, queue_id))
        min_offset = state.queue.min_offset if state is not None else 0
        max_offset = state.queue.max_offset if state is not None else 0
        if state is None or max_offset == 0:
            status, position = GetMessageStatus.NO_MESSAGE_IN_QUEUE, self._corrected(0, offset)
        elif offset < min_offset:
            status, position = GetMessageStatus.OFFSET_TOO_SMALL, self._corrected(min_offset, offset)
        elif offset == max_offset:
            status, position = GetMessageStatus.OFFSET_OVERFLOW_ONE, offset
        elif offset > max_offset:
            status, position = GetMessageStatus.OFFSET_OVERFLOW_BADLY, self._corrected(max_offset, offset)
        else:
            if bulk_bytes:
                max_messages = min(max_messages, _BULK_MESSAGES)
            entries = max(_SCAN_ENTRIES, max_messages)
            is_everything = not bulk_bytes and matches is None and matches_record is None
            picker = None if bulk_bytes else self.picker_of(state, matches, matches_record)
            if is_everything or picker is not None:
                found = self._read_simply(state, offset, max_messages, picker)
                if found is not None:
                    return found
            if is_everything:
                # Without a filter every entry counts: no need to look at more than fit a batch, and one to see its end.
                limits = self.config
                most = max(limits.max_transfer_count_on_message_in_memory, limits.max_transfer_count_on_message_in_disk)
                few = max(1, min(max_messages, most)) + 1
                raw = state.queue.read(offset, few)
                if raw:
                    result = self._scan(state, offset, raw, max_messages, None, None)
                    if result.next_begin_offset < offset + few:  # else some are gone, and there is room for others
                        return result
            raw = state.queue.read(offset, entries)
            if raw:
                return self._scan(state, offset, raw, max_messages, matches, matches_record, bulk_bytes)
            status = GetMessageStatus.OFFSET_FOUND_NULL
            position = self._corrected(state.queue.next_file_offset(offset), offset)
        return ReadResult(status, position, min_offset, max_offset)

    def picker_of(
        self, state: QueueState, matches: MatchesEntry | None, matches_record: MatchesRecord | None
    ) -> Picker | None:
        """The one test that tells which messages of this queue pass both, if it can be made of many at once."""
        if state.ext is not None:
            return None
        if matches_record is None:
            return matches if isinstance(matches, TagCodes) else None
        if isinstance(matches_record, PropertyFilter) and (matches is None or isinstance(matches, UnitTest)):
            return matches_record
        return None

    def backlog(
        self, state: QueueState, offset: int, max_messages: int, picker: Picker | None = None
    ) -> FoundBacklog | None:
        """What the wanted records of a queue from `offset` on can be read with; None when that takes `read`.

        Its entries are those of a reply, unless their records have more bytes than allowed. They may be none.
        """
        self._check_open()
        config, segments, queue = self.config, self._segments, state.queue
        most_bytes = config.max_transfer_bytes_on_message_in_memory
        most = config.max_transfer_count_on_message_in_memory
        if max_messages < most:
            most = max_messages if max_messages > 0 else 1
        raw = queue.read(offset, most if picker is None else max(_SCAN_ENTRIES, max_messages))
        if not raw:
            return None
        first = int.from_bytes(raw[:8], "big")
        segment = segments.find(first)
        if segment is None:
            return None
        hot_from = segments.max_offset - self._memory_limit
        is_cold = first < hot_from
        if is_cold:
            most_bytes = config.max_transfer_bytes_on_message_in_disk
            most = max(1, min(max_messages, config.max_transfer_count_on_message_in_disk))
            if picker is None:
                raw = queue.read(offset, most + 1)
        if picker is None:
            entries = raw[: most * ENTRY_SIZE]
            scanned = len(entries) // ENTRY_SIZE
        else:
            picked = picker.pick((raw, segment.view, segment.start, segment.readable, most_bytes), most)
            if picked is None:
                return None
            entries, scanned = picked
        if is_cold:
            # Other limits are those of recent messages. Neither the last one may be recent nor the one behind it.
            last = scanned * ENTRY_SIZE - ENTRY_SIZE
            for at in (last, last + ENTRY_SIZE):
                if int.from_bytes(raw[at : at + 8], "big") >= hot_from:
                    return None
        return (entries, segment.view, segment.start, segment.readable, most_bytes), scanned, is_cold

    def _read_simply(
        self, state: QueueState, offset: int, max_messages: int, picker: Picker | None
    ) -> ReadResult | None:
        found = self.backlog(state, offset, max_messages, picker)
        if found is None:
            return None
        backlog, scanned, is_cold = found
        status, slices, count, byte_count = GetMessageStatus.NO_MATCHED_MESSAGE, [], 0, 0
        if backlog[0]:
            simple = records_of(backlog)
            if simple is None:
                return None
            pieces, count, byte_count = simple
            status = GetMessageStatus.FOUND
            slices = [pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))]
        queue = state.queue
        return ReadResult(
            status, offset + scanned, queue.min_offset, queue.max_offset, slices, count, byte_count, is_cold
        )

    def _scan(
        self,
        state: QueueState,
        offset: int,
        raw: bytes,
        max_messages: int,
        matches: MatchesEntry | None,
        matches_record: MatchesRecord | None,
        bulk_bytes: int = 0,
    ) -> ReadResult:
        config = self.config
        find = self._segments.find
        log_max = self.commit_log.max_offset
        hot_from = log_max - self._memory_limit
        hot_bytes = config.max_transfer_bytes_on_message_in_memory
        hot_count = min(max_messages, config.max_transfer_count_on_message_in_memory)
        cold_bytes = config.max_transfer_bytes_on_message_in_disk
        cold_count = min(max_messages, config.max_transfer_count_on_message_in_disk)
        if bulk_bytes:
            hot_bytes, cold_bytes = bulk_bytes, min(bulk_bytes, _COLD_BULK_BYTES)
            hot_count = cold_count = max_messages

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
        if bulk_bytes and byte_count < len(slices) * _COPY_PIECES_BELOW:
            slices = [memoryview(b"".join(slices))]
        return ReadResult(
            GetMessageStatus.FOUND if count else status,
            offset + scanned,
            state.queue.min_offset,
            state.queue.max_offset,
            slices,
            count,
            byte_count,
            log_max - physical_offset > self._memory_limit,
        )

    def _corrected(self, right: int, requested: int) -> int:
        """A slave may simply lag behind: it does not move a consumer's offset unless told to."""
        if self.config.broker_role is BrokerRole.SLAVE and not self.config.offset_check_in_slave:
            return requested
        return right

    def min_offset_of(self, topic: str, queue_id: int) -> int:
        state = self._states.get((topic, queue_id))
        return state.queue.min_offset if state is not None else 0

    def max_offset_of(self, topic: str, queue_id: int) -> int:
        state = self._states.get((topic, queue_id))
        return state.queue.max_offset if state is not None else 0

    def physical_offset_of(self, topic: str, queue_id: int, queue_offset: int) -> PhysicalOffset:
        """Where the message with this queue offset lies in the log; -1 when the queue has no such entry."""
        state = self._states.get((topic, queue_id))
        raw = state.queue.read(queue_offset, 1) if state is not None else b""
        return ENTRY.unpack(raw)[0] if raw else PhysicalOffset(-1)

    def entries(self, topic: str, queue_id: int, offset: int, max_entries: int) -> list[QueueEntry]:
        """Some entries of a queue from `offset` on, without their messages; none when `offset` lies outside of it."""
        state = self._states.get((topic, queue_id))
        if state is None:
            return []
        found = [QueueEntry(*entry) for entry in ENTRY.iter_unpack(state.queue.read(offset, max_entries))]
        if state.ext is not None:
            for number, (physical_offset, size, code) in enumerate(found):
                unit = state.ext.get(code) if ConsumeQueueExt.is_ext_address(code) else None
                if unit is not None:
                    found[number] = QueueEntry(physical_offset, size, unit.tags_code)
        return found

    def is_beyond_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Does this message lie so far back in the log that memory is unlikely to hold it? No when it is not there."""
        physical_offset = self.physical_offset_of(topic, queue_id, queue_offset)
        return physical_offset >= 0 and self.commit_log.max_offset - physical_offset > self._memory_limit

    def store_time_of(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Store time of one message; -1 when it is not there."""
        physical_offset = self.physical_offset_of(topic, queue_id, queue_offset)
        return self.commit_log.store_timestamp_at(physical_offset) if physical_offset >= 0 else -1

    def earliest_store_time_of(self, topic: str, queue_id: int) -> int:
        return self.store_time_of(topic, queue_id, self.min_offset_of(topic, queue_id))

    @property
    def earliest_store_time(self) -> int:
        """Store time of the oldest message of all; -1 when there is none."""
        return self.commit_log.store_timestamp_at(self.min_offset) if self.min_offset >= 0 else -1

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int) -> int:
        """The queue offset of the message stored nearest to `timestamp`."""
        self._check_open()
        state = self._states.get((topic, queue_id))
        if state is None:
            return 0
        return state.queue.search_by_time(
            timestamp,
            self.min_offset,
            lambda physical_offset, size: self.commit_log.store_timestamp_at(PhysicalOffset(physical_offset)),
        )

    def record_at(self, physical_offset: int) -> memoryview | None:
        """The record that begins at this offset of the log, or None."""
        self._check_open()
        return self.commit_log.record_at(PhysicalOffset(physical_offset))

    def record_by_id(self, message_id: str) -> memoryview | None:
        """The record an offset message id points at, or None. The host in the id is not compared."""
        return self.record_at(parse_offset_message_id(message_id).physical_offset)

    def query(self, topic: str, key: str, max_messages: int, begin: int, end: int) -> QueryResult:
        """Records whose key has the same hash, stored from `begin` to `end`; who asks compares the key text."""
        self._check_open()
        if self.index is None:
            return QueryResult([], 0, 0)
        timestamp, physical_offset = 0, PhysicalOffset(0)
        wanted = min(max_messages, self.config.max_msgs_num_batch)
        for _ in range(_QUERY_ROUNDS):
            found = self.index.query(topic, key, wanted, begin, end)
            timestamp, physical_offset = found.last_update_timestamp, found.last_update_physical_offset
            offsets = sorted(set(found.physical_offsets))
            if not offsets:
                break
            records = [record for offset in offsets if (record := self.commit_log.record_at(offset)) is not None]
            if records:
                return QueryResult(records, timestamp, physical_offset)
            # Everything found is gone already: look further back.
            end = self.commit_log.store_timestamp_at(offsets[0])
            if end < begin:
                break
        return QueryResult([], timestamp, physical_offset)
