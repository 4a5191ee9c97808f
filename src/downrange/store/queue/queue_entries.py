"""The entries of one queue as they are read: those in its files, and the newest, which are in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.store.files import Files
from downrange.store.queue.queue_entry import BLANK, ENTRY, ENTRY_SIZE
from downrange.store.queue.queue_files import READ_BLOCK, QueueFiles
from downrange.store.queue.queue_tails import END, NEXT, PHYSICAL_END, START, QueueTails
from downrange.store.queue.time_search import nearest_by_time

_MANY: Final = 2_000  # queues, of which none keeps a descriptor: a process has only so many
_NEAR_THE_END: Final = 240
NO_COPY: Final = (0, b"")


class QueueEntries(QueueFiles):
    """Reading and searching. `ConsumeQueue` says which entries there are: it alone changes them.

    A base for the same reason as `OffsetFiles`.
    """

    __slots__ = ("_copy", "_created", "_first", "_last_read", "_min", "_tails", "row")

    def __init__(
        self, directory: Path | str, file_size: int, files: Files, tails: QueueTails, *, writable: bool
    ) -> None:
        super().__init__(directory, file_size, files, writable=writable)
        self._tails = tails
        self.row = tails.add_row()
        self._first = self._created = 0  # the files that exist cover [_first, _created)
        self._min = 0
        self._last_read = -1
        self._copy = NO_COPY

    @property
    def tails(self) -> QueueTails:
        return self._tails

    @property
    def _end(self) -> int:
        return self._tails.rows[self.row + END]

    @property
    def _tail(self) -> int:
        """Where the entries that are in memory begin."""
        return self._tails.rows[self.row + START]

    # A NewType is called at runtime, too, which takes as long as the rest: `type: ignore` takes no time.

    @property
    def next_offset(self) -> QueueOffset:
        """The queue offset the next message gets: behind `max_offset` while numbered messages have no entry yet."""
        return self._tails.rows[self.row + NEXT]  # type: ignore[return-value]

    @next_offset.setter
    def next_offset(self, queue_offset: QueueOffset) -> None:
        self._tails.rows[self.row + NEXT] = queue_offset

    @property
    def max_physical_offset(self) -> PhysicalOffset:
        """Where the record of the last entry ends in the commit log; 0 when there is none."""
        return self._tails.rows[self.row + PHYSICAL_END]  # type: ignore[return-value]

    @property
    def min_offset(self) -> QueueOffset:
        """The first queue offset whose message is still in the commit log."""
        return self._min // ENTRY_SIZE  # type: ignore[return-value]

    @property
    def max_offset(self) -> QueueOffset:
        """The queue offset behind the last entry."""
        return self._tails.rows[self.row + END] // ENTRY_SIZE  # type: ignore[return-value]

    @property
    def _may_keep_open(self) -> bool:
        return self._tails.queues <= _MANY

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, queue_offset: QueueOffset, max_entries: int) -> bytes:
        """The entries from `queue_offset` on, never beyond the end of their file; empty when there are none."""
        position = queue_offset * ENTRY_SIZE
        rows, row = self._tails.rows, self.row
        end = rows[row + END]
        if position < self._min or position >= end or max_entries <= 0:
            return b""
        file_size = self._file_size
        length = min(max_entries * ENTRY_SIZE, file_size - position % file_size, end - position)
        in_file = rows[row + START] - position
        if in_file <= 0:
            return self._read_tail(position, position + length)
        start = position - position % file_size
        if start == self._descriptor_start and in_file >= length:
            self._last_read = start
            return os.pread(self._descriptor, length, position - start)
        if start == self._last_read and self._may_keep_open:
            self._keep_open(start)  # somebody reads through this file: worth a descriptor
        self._last_read = start
        return self._bytes(position, length)

    def _read_tail(self, position: int, stop: int) -> bytes:
        """Entries that are in memory. All of them are copied once; further reads are slices of that copy."""
        start, copy = self._copy
        if position < start or stop > start + len(copy):
            end = self._end
            if end - position <= _NEAR_THE_END:  # keeps up: there is little to read before there is more
                return self._tails.read(self.row, position, stop)
            self._copy = start, copy = position, self._tails.read(self.row, position, end)
        return copy[position - start : stop - start]

    def next_file_offset(self, queue_offset: QueueOffset) -> QueueOffset:
        """The first queue offset of the file after the one that holds `queue_offset`."""
        return QueueOffset(self._file_end(queue_offset * ENTRY_SIZE) // ENTRY_SIZE)

    def search_by_time(
        self, timestamp: int, commit_log_min: PhysicalOffset, store_time_of: Callable[[PhysicalOffset], int]
    ) -> QueueOffset:
        """The queue offset whose message was stored nearest to `timestamp`, of two equally near ones the earlier.

        `store_time_of(physical_offset)` is negative for a record that cannot be read; the answer is then 0. The
        file is the first that was changed at `timestamp` or later: RocketMQ's rule, kept so that both answer alike.
        """
        if self._end == self._first:
            return QueueOffset(0)
        start = self._file_by_time(timestamp)
        low = max(self._min, start) // ENTRY_SIZE
        high = min(self._end, start + self._file_size) // ENTRY_SIZE - 1

        def time_of(queue_offset: int) -> int | None:
            entry = self._bytes(queue_offset * ENTRY_SIZE, ENTRY_SIZE)
            physical_offset, _, _ = ENTRY.unpack(entry)
            has_expired = physical_offset < commit_log_min or entry[:12] == BLANK[:12]
            return None if has_expired else store_time_of(physical_offset)

        found = nearest_by_time(timestamp, low, high, time_of)
        return self.min_offset if found is None else QueueOffset(found)

    def _file_by_time(self, timestamp: int) -> int:
        last = self._end - ENTRY_SIZE
        last -= last % self._file_size
        first = self._min - self._min % self._file_size
        for start in range(first, min(last, self._created), self._file_size):
            if os.stat(self._path(start)).st_mtime_ns // 1_000_000 >= timestamp:
                return start
        return last

    def _bytes(self, position: int, length: int) -> bytes:
        """`length` bytes of one file or its tail; both ends are within the queue."""
        in_file = self._tail - position
        if in_file <= 0:
            return self._tails.read(self.row, position, position + length)
        start = position - position % self._file_size
        if start == self._descriptor_start:
            data = os.pread(self._descriptor, min(length, in_file), position - start)
        else:
            with self._opened(start) as descriptor:
                data = os.pread(descriptor, min(length, in_file), position - start)
        if in_file < length:
            data += self._tails.read(self.row, position + in_file, position + length)
        return data

    # -- searching by physical offset: it grows from entry to entry, except that blanks stand anywhere -----------------

    def _first_from(self, physical_offset: PhysicalOffset) -> QueueOffset:
        """The queue offset of the first real entry that points at or behind `physical_offset`, else the end."""
        low, high = self._first // ENTRY_SIZE, self._end // ENTRY_SIZE
        while low < high:
            middle = (low + high) // 2
            real = self._last_real_before((middle + 1) * ENTRY_SIZE, low * ENTRY_SIZE)
            if real is None or real[0] < physical_offset:
                low = middle + 1
            else:
                high = real[2]
        return QueueOffset(low)

    def _last_real_before(self, stop: int, low: int) -> tuple[PhysicalOffset, int, int] | None:
        """Physical offset, size and queue offset of the last entry in [low, stop) that is not blank."""
        length = ENTRY_SIZE
        while stop > low:
            position = max(low, stop - length, stop - ENTRY_SIZE - (stop - ENTRY_SIZE) % self._file_size)
            block = self._bytes(position, stop - position)
            if block != BLANK * (len(block) // ENTRY_SIZE):
                for at in range(len(block) - ENTRY_SIZE, -1, -ENTRY_SIZE):
                    if block[at : at + ENTRY_SIZE] != BLANK:
                        physical_offset, size, _ = ENTRY.unpack_from(block, at)
                        return physical_offset, size, (position + at) // ENTRY_SIZE
            stop = position
            length = READ_BLOCK
        return None

    def _physical_end_before(self, end: int) -> PhysicalOffset:
        real = self._last_real_before(end, self._first)
        return PhysicalOffset(real[0] + real[1] if real else 0)
