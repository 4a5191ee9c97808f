"""Reads consume queues and commit-log files of a store directory as arrays, without locking or changing anything.

A live store grows while we read it: its broker writes a record before the queue entry that points at it, and the head
of a record after the rest of it, so an entry can be read if its record has its head.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from downrange.model.record import SIZE_AND_MAGIC, STORE_TIMESTAMP_END, record_size, store_timestamp_of
from downrange.spark.planner import Reach
from downrange.store.queue.consume_queue import ENTRY_SIZE, count_valid

ENTRY: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
assert ENTRY.itemsize == ENTRY_SIZE

Entries = npt.NDArray[Any]

_PRE_BLANK_SIZE: Final = 2**31 - 1
"""The size in entries with which Java fills the space before the first message of a queue."""
_MOST_MAPPED: Final = 4


class LogFiles:
    """The commit-log files of one store: single records by offset, whole files as buffers.

    At most a few files are mapped at a time. For one thread.
    """

    def __init__(self, file_size: int, files: dict[int, Path]) -> None:
        self.file_size = file_size
        self._files = files
        self._mapped: OrderedDict[int, mmap.mmap] = OrderedDict()

    @property
    def min_offset(self) -> int:
        return min(self._files, default=0)

    def start_of(self, physical_offset: int) -> int:
        return physical_offset - physical_offset % self.file_size

    def map(self, start: int) -> mmap.mmap | None:
        """The file that begins at `start`; None when it does not exist (any more)."""
        found = self._mapped.get(start)
        if found is None:
            path = self._files.get(start)
            if path is None:
                return None
            try:
                with path.open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError):  # expired meanwhile, or still empty
                return None
            self._mapped[start] = found
            if len(self._mapped) > _MOST_MAPPED:
                self._mapped.popitem(last=False)  # closed with the last reference to it
        return found

    def _bytes(self, physical_offset: int, count: int) -> bytes:
        start = self.start_of(physical_offset)
        whole = self.map(start)
        return b"" if whole is None else whole[physical_offset - start : physical_offset - start + count]

    def has_record(self, physical_offset: int, size: int) -> bool:
        """Whether a complete record of this size begins at this offset."""
        return record_size(self._bytes(physical_offset, SIZE_AND_MAGIC.size)) == size

    def store_time(self, physical_offset: int) -> int:
        return store_timestamp_of(self._bytes(physical_offset, STORE_TIMESTAMP_END))


class QueueFiles:
    """The entries of one consume queue by number. Files are opened for each read, because there may be many queues.

    `names` are those of the files when the directory was listed, `file_size` is the size that all of them have.
    """

    def __init__(self, directory: Path, names: Iterable[str], file_size: int) -> None:
        self._directory = str(directory)
        self._starts = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
        """The first bytes of the files, counted from the first entry ever."""
        self._file_size = file_size

    def _open(self, start: int) -> int | None:
        """A descriptor of the file that begins at `start`; None when it expired meanwhile."""
        try:
            return os.open(f"{self._directory}/{start:020d}", os.O_RDONLY)
        except FileNotFoundError:
            return None

    def entries(self, first: int, count: int) -> Entries:
        """Up to `count` entries from number `first` on; fewer when a file ends before."""
        at = first * ENTRY_SIZE % self._file_size
        descriptor = self._open(first * ENTRY_SIZE - at)
        if descriptor is None:
            return np.empty(0, ENTRY)
        try:
            raw = os.pread(descriptor, min(count * ENTRY_SIZE, self._file_size - at), at)
        finally:
            os.close(descriptor)
        return np.frombuffer(raw, ENTRY, len(raw) // ENTRY_SIZE)

    def _entry(self, number: int) -> tuple[int, int] | None:
        found = self.entries(number, 1)
        return (int(found["physical_offset"][0]), int(found["size"][0])) if len(found) else None

    def reach(self, log: LogFiles) -> Reach:
        """The range of entries whose records are in the log: the oldest may be deleted, the newest not written yet."""
        if not self._starts:
            return Reach(0, 0)
        low = self._starts[0] // ENTRY_SIZE
        end = self._end()
        if end > low and self._is_kept(low, log):  # nearly always
            minimum = low
        else:
            minimum = low + _first(end - low, lambda number: self._is_kept(low + number, log))
        if end > minimum and not self._is_readable(end - 1, log):
            # A log that a crash has cut, or a copy of a live store, may be shorter than its queues.
            end = minimum + _first(end - minimum, lambda number: not self._is_readable(minimum + number, log))
        return Reach(minimum, end)

    def _end(self) -> int:
        """The number after that of the last written entry."""
        for start in reversed(self._starts):
            written = self._written(start)
            if written:
                return start // ENTRY_SIZE + written
        return self._starts[0] // ENTRY_SIZE

    def _written(self, start: int) -> int:
        """The number of written entries of the file that begins at `start`."""
        descriptor = self._open(start)
        if descriptor is None:
            return 0
        try:
            return _first(
                self._file_size // ENTRY_SIZE,
                lambda number: count_valid(os.pread(descriptor, ENTRY_SIZE, number * ENTRY_SIZE)) != 1,
            )
        finally:
            os.close(descriptor)

    def _is_kept(self, number: int, log: LogFiles) -> bool:
        entry = self._entry(number)
        return entry is not None and entry[0] >= log.min_offset and entry[1] != _PRE_BLANK_SIZE

    def _is_readable(self, number: int, log: LogFiles) -> bool:
        entry = self._entry(number) if number >= 0 else None
        return entry is not None and log.has_record(*entry)

    def at_time(self, millis: int, reach: Reach, log: LogFiles) -> int:
        """The first entry whose message was stored at `millis` or later."""

        def is_late(number: int) -> bool:
            entry = self._entry(reach.minimum + number)
            return entry is None or log.store_time(entry[0]) >= millis

        return reach.minimum + _first(reach.maximum - reach.minimum, is_late)


def _first(count: int, is_true: Any) -> int:
    """The first number below `count` for which `is_true`, found by bisection; `count` when there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low
