"""Compares the consume queues with the log. Part of `check`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from downrange.model.hashing import tags_code
from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.properties import find_in_bytes
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.store.check.directory import QueuePlace, StoreDirectory, StoreState
from downrange.store.check.queues_in_log import NOT_IN_A_QUEUE, QueueInLog, QueuesInLog
from downrange.store.errors import StoreCorrupt, StoreError
from downrange.store.files import OS_FILES, opened
from downrange.store.queue.consume_queue import BLANK, ENTRY, ENTRY_SIZE, count_valid, file_starts
from downrange.store.queue.consume_queue_ext import ConsumeQueueExt

_FIRST_BLOCK: Final = 4_080  # of most queues this is all, and reading holes fills the page cache with zeros
_BLOCK: Final = 65_520
REBUILD_QUEUES: Final = "stop the broker and move the directory consumequeue away: the next start builds it again"


class QueueCheck:
    """Compares every queue with the log; run it once, after the log was read up to `log_end`."""

    def __init__(
        self,
        directory: StoreDirectory,
        in_log: QueuesInLog,
        is_damaged: Callable[[PhysicalOffset], bool],
        log_end: PhysicalOffset,
        replayed_from: PhysicalOffset,
    ) -> None:
        self._directory = directory
        self._problems = directory.problems
        self._in_log = in_log
        self._is_damaged = is_damaged
        self._log_min = max(0, directory.segments.min_offset)
        self._log_end = log_end
        # After a crash the next start enters again what lies behind this offset.
        self._replayed_from = replayed_from
        self._delays = directory.config.delay_level_millis()
        self.entries = 0
        self.files = 0
        self.bytes = 0
        self.lagging = 0
        """Messages of the log that have no entry yet, and will get one."""

    def run(self, progress: Callable[[int, int], None], topics: Mapping[str, int] | None) -> None:
        """`topics` says how many queues each topic has, as far as that is known."""
        seen = set()
        places = self._directory.queues
        for number, place in enumerate(places):
            progress(number, len(places))
            key = place.topic.encode("utf-8", "surrogateescape"), place.queue_id
            seen.add(key)
            self._check_queue(place, self._in_log[key])
        for key in self._in_log:
            if key not in seen:
                self._missing_queue(key[0].decode("utf-8", "replace"), key[1], self._in_log[key], topics)
        progress(len(places), len(places))

    def _missing_queue(self, topic: str, queue_id: int, queue: QueueInLog, topics: Mapping[str, int] | None) -> None:
        if topics is not None and queue_id >= topics.get(topic, 0):
            self._directory.notes.append(
                f"queue {topic}/{queue_id} is gone and so is its topic: {queue.records} messages"
            )
        elif self._may_lag(queue.first_physical):
            self.lagging += queue.records
        else:
            what = f"is missing, but the log holds {queue.records} messages of it"
            self._problems.add(f"queue {topic}/{queue_id}", "missing", what, REBUILD_QUEUES)

    def _may_lag(self, physical_offset: PhysicalOffset) -> bool:
        state = self._directory.state
        return state is StoreState.LIVE or (state is StoreState.CRASHED and physical_offset >= self._replayed_from)

    def _check_queue(self, place: QueuePlace, in_log: QueueInLog) -> None:
        where = f"queue {place.topic}/{place.queue_id}"
        try:
            ext = self._ext_of(place)
        except StoreError as error:
            self._problems.add(where, "ext", str(error), "see the message")
            ext = None
        entries_in_log = 0
        size = self._directory.queue_file_size or ENTRY_SIZE
        try:
            starts = file_starts(str(place.path), size)
        except StoreCorrupt as error:
            self._problems.add(where, "files", str(error), REBUILD_QUEUES)
            return
        self.files += len(starts)
        self.bytes += size * len(starts)
        end = starts[0] // ENTRY_SIZE if starts else 0
        is_first = True
        previous = -1
        for queue_offset, raw in self._entries(where, place, starts, size):
            end = queue_offset + 1
            if raw == BLANK:
                if not is_first:
                    self._directory.notes.append(f"{where}: queue offset {queue_offset} holds no message any more")
                continue
            is_first = False
            self.entries += 1
            physical_offset, record_size, code = ENTRY.unpack(raw)
            if physical_offset <= previous:
                what = f"entry {queue_offset} points at {physical_offset}, the one before at {previous}"
                self._problems.add(where, "order", what, REBUILD_QUEUES)
            previous = physical_offset
            if physical_offset < self._log_min or self._is_damaged(physical_offset):
                continue
            entries_in_log += in_log.first_physical <= physical_offset < self._log_end
            wrong = self._compare(place, queue_offset, physical_offset, record_size, code, ext)
            if wrong and not (physical_offset >= self._log_end and self._directory.is_live):
                self._problems.add(where, "entry", f"entry {queue_offset} {wrong}", REBUILD_QUEUES)
        missing = in_log.records - entries_in_log
        at_end = max(0, min(missing, in_log.last_offset + 1 - end))
        if at_end and self._may_lag(in_log.last_physical):
            self.lagging += at_end
            missing -= at_end
        if missing > 0:
            what = f"{missing} of {in_log.records} messages in the log have no entry"
            self._problems.add(where, "missing", what, REBUILD_QUEUES)

    def _ext_of(self, place: QueuePlace) -> ConsumeQueueExt | None:
        ext_place = self._directory.ext_queues.get((place.topic, place.queue_id))
        if ext_place is None or self._directory.ext_file_size is None:
            return None
        ext = ConsumeQueueExt(ext_place.path, self._directory.ext_file_size, OS_FILES, writable=False)
        ext.load()
        ext.recover()
        return ext

    def _entries(
        self, where: str, place: QueuePlace, starts: list[int], size: int
    ) -> Iterator[tuple[QueueOffset, bytes]]:
        """Every entry and its queue offset, up to the end; complains when there is data behind the end."""
        ended = False
        for start in starts:
            path = f"{place.path}/{start:020d}"
            with suppress(FileNotFoundError), opened(OS_FILES, path, writable=False) as descriptor:  # it may expire
                at, most = 0, _FIRST_BLOCK
                while at < size and not ended:
                    block = os.pread(descriptor, min(most, size - at), at)
                    most = _BLOCK
                    valid = count_valid(block)
                    for position in range(0, valid * ENTRY_SIZE, ENTRY_SIZE):
                        yield (
                            QueueOffset((start + at + position) // ENTRY_SIZE),
                            block[position : position + ENTRY_SIZE],
                        )
                    at += valid * ENTRY_SIZE
                    ended = valid * ENTRY_SIZE < len(block) or not block
                if ended and not self._directory.is_live and _has_data(descriptor, at, size):
                    what = f"there is data behind its end, entry {(start + at) // ENTRY_SIZE}"
                    self._problems.add(where, "tail", what, self._tail_remedy())

    def _tail_remedy(self) -> str:
        return "the next start cuts it off" if self._directory.state is StoreState.CRASHED else REBUILD_QUEUES

    def _compare(
        self,
        place: QueuePlace,
        queue_offset: QueueOffset,
        physical_offset: PhysicalOffset,
        size: int,
        code: int,
        ext: ConsumeQueueExt | None,
    ) -> str:
        """The fault of an entry, in words; empty when the entry points at its record."""
        record = self._directory.record_at(physical_offset)
        if record is None:
            return f"points at {physical_offset}, where no record begins"
        topic, timestamp = record.topic, record.store_timestamp
        if topic != place.topic.encode("utf-8", "surrogateescape") or record.queue_id != place.queue_id:
            return f"points at {physical_offset}, a record of {topic.decode('utf-8', 'replace')}/{record.queue_id}"
        if record.sys_flag & NOT_IN_A_QUEUE:
            return f"points at {physical_offset}, a message that takes no part in a queue"
        if record.queue_offset != queue_offset:
            return f"points at {physical_offset}, a record with queue offset {record.queue_offset}"
        if record.size != size:
            return f"says {size} bytes, its record has {record.size}"
        if ConsumeQueueExt.is_ext_address(code):
            unit = ext.get(code) if ext is not None else None
            if unit is None:
                return f"refers to an ext unit at {code + (1 << 63)} that is not there"
            if unit.store_timestamp != timestamp:
                return f"refers to an ext unit stored at {unit.store_timestamp}, its record at {timestamp}"
            code = unit.tags_code
        if not self._is_right_code(place.topic, code, timestamp, record.properties):
            return f"has tags code {code}, which is not that of its record"
        return ""

    def _is_right_code(self, topic: str, code: int, timestamp: int, properties: bytes) -> bool:
        delay = find_in_bytes(properties, b"DELAY") if topic == SCHEDULE_TOPIC else None
        if delay is not None and delay.isdigit() and int(delay) > 0:
            if not self._directory.has_config:
                return code > timestamp  # the levels are not known
            # RocketMQ takes a second for a level that it does not know.
            return code - timestamp in (self._delays[min(int(delay), len(self._delays)) - 1], 1000)
        tags = find_in_bytes(properties, b"TAGS") or b""
        return code == tags_code(tags.decode("utf-8", "replace"))


def _has_data(descriptor: int, at: int, size: int) -> bool:
    """Is there anything but zeros from `at` on? Holes of a sparse file are skipped unread."""
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return False
        hole = os.lseek(descriptor, at, os.SEEK_HOLE)
        block = os.pread(descriptor, min(_BLOCK, hole - at, size - at), at)
        if block != bytes(len(block)):
            return True
        at += len(block)
    return False
