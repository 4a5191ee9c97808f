"""The consume queue extension: per message its tags code, store time and filter bitmap.

The consume-queue entry then holds the unit's address where its tags code would stand. Off by default in RocketMQ; see
docs/formats/consume-queue-ext.md.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from downrange.store.errors import StoreClosed, StoreError
from downrange.store.files import Files
from downrange.store.queue.queue_files import OffsetFiles, file_starts

# One unit: its whole size, tags code, store timestamp, bitmap size; the bitmap follows.
UNIT: Final = struct.Struct(">hqqh")
assert UNIT.size == 20
MAX_UNIT_SIZE: Final = 32_767

_END_MARK: Final = struct.pack(">h", -1)  # no more units in this file
_BLOCK: Final = 65_536  # to read at once when walking: any unit fits
_END_ROOM: Final = 4  # bytes at the end of a file that no unit takes

# An address is the unit's offset + FIRST_ADDRESS. A tag hash has 32 bits, so it is never as low as LAST_ADDRESS.
FIRST_ADDRESS: Final = -(1 << 63)
LAST_ADDRESS: Final = -(1 << 31) - 1

_REMEDY: Final = "move the directories consumequeue and consumequeue_ext away: both are built again from the commit log"


class ExtUnit(NamedTuple):
    """What the extension knows about one message."""

    tags_code: int
    store_timestamp: int
    bitmap: bytes


class UnitTest:
    """A test of queue entries that each without a unit passes. A value."""

    __slots__ = ("_matches",)

    def __init__(self, matches: Callable[[ExtUnit], bool]) -> None:
        self._matches = matches

    def __call__(self, tags_code: int | None, unit: ExtUnit | None) -> bool:
        return unit is None or self._matches(unit)


class ConsumeQueueExt(OffsetFiles):
    """The units of one topic queue, in files none of which a unit spans.

    Always: behind the last unit there are only zeros. One thread puts, reads and cuts; `flush` may run beside `put` and
    `get` in another.
    """

    __slots__ = ("_created", "_end", "_first", "_flushed")

    def __init__(self, directory: Path, file_size: int, files: Files, *, writable: bool = True) -> None:
        if file_size < UNIT.size + _END_ROOM:
            raise StoreError(f"a file of {file_size} bytes is too small for a consume queue extension")
        super().__init__(directory, file_size, files, writable=writable)
        # Files cover [_first, _created), units [_first, _end).
        self._first = self._created = self._end = self._flushed = 0

    def __repr__(self) -> str:
        return f"<ConsumeQueueExt {self._directory} bytes {self._first}..{self._end}>"

    @staticmethod
    def is_ext_address(tags_code: int) -> bool:
        """Whether what a consume-queue entry holds is an address of a unit, not a tags code."""
        return tags_code <= LAST_ADDRESS

    @property
    def min_address(self) -> int:
        return self._first + FIRST_ADDRESS

    @property
    def max_address(self) -> int:
        """The address behind the last unit."""
        return self._end + FIRST_ADDRESS

    # -- opening -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """See which files there are; they count as full until `recover` has looked into them."""
        self.release()
        starts = file_starts(self._directory, self._file_size, _REMEDY)
        self._first = starts[0] if starts else 0
        self._created = self._end = self._flushed = starts[-1] + self._file_size if starts else 0

    def recover(self) -> None:
        """Find the end: behind the last whole unit of the last file that has any.

        What the consume queue does not refer to is then cut by `truncate_by_max_address`.
        """
        end = self._first
        for start in range(self._created - self._file_size, self._first - 1, -self._file_size):
            if units_end := self._units_end(start):
                end = start + units_end
                break
        self._cut(end)
        self._flushed = self._first  # a killed process may have left pages that were never synced

    def _units_end(self, start: int) -> int:
        at = 0
        with self._opened(start) as descriptor:
            while True:
                block = os.pread(descriptor, min(_BLOCK, self._file_size - at), at)
                taken = 0
                while (length := _unit_size(block, taken)) > 0:
                    taken += length
                if not taken:
                    return at
                at += taken

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, tags_code: int, store_timestamp: int, bitmap: bytes = b"") -> int:
        """Append a unit; return what the consume-queue entry shall hold.

        That is the unit's address, or `tags_code` itself when the bitmap is too large for a unit: a message without one
        is not filtered out early, which is always right.
        """
        if not self._writable:
            raise StoreClosed(f"{self._directory} is open for reading only")
        length = UNIT.size + len(bitmap)
        if length > min(MAX_UNIT_SIZE, self._file_size - _END_ROOM):
            return tags_code
        at = self._end % self._file_size
        if length > self._file_size - at - _END_ROOM:
            self._write(self._end, _END_MARK)
            self._end += self._file_size - at
        address = self._end + FIRST_ADDRESS
        self._write(self._end, UNIT.pack(length, tags_code, store_timestamp, len(bitmap)) + bitmap)
        self._end += length
        return address

    def _write(self, position: int, data: bytes) -> None:
        start = position - position % self._file_size
        if start >= self._created:
            self._files.create(self._path(start), self._file_size)
            self._created = start + self._file_size
        self._keep_open(start)
        self._files.write_at(self._descriptor, data, position - start)

    def flush(self) -> bool:
        """Sync all units put so far; whether there was anything to do. May run in a worker thread."""
        end, flushed = self._end, self._flushed
        if end <= flushed:
            return False
        self._sync_files(flushed, end)
        self._sync_names()
        self._flushed = end
        return True

    def truncate_by_max_address(self, address: int) -> None:
        """Cut off everything behind the unit at `address`, the largest one the consume queue refers to."""
        unit = self.get(address)
        if unit is not None:
            self._cut(address - FIRST_ADDRESS + UNIT.size + len(unit.bitmap))

    def truncate_by_min_address(self, address: int) -> int:
        """Remove the files that end before `address`, the smallest one the consume queue refers to; how many."""
        removed = 0
        if self._writable and self.is_ext_address(address):
            while self._created - self._first > self._file_size:
                if self._first + self._file_size > address - FIRST_ADDRESS:
                    break
                self._remove(self._first)
                self._first += self._file_size
                removed += 1
        return removed

    def _cut(self, end: int) -> None:
        if self._writable:
            keep = max(end, self._first + 1)
            while self._created - self._file_size >= keep:
                self._created -= self._file_size
                self._remove(self._created)
            if end < self._created:
                self._zero_after(end)
        self._end = end
        self._flushed = min(self._flushed, end)

    def _remove(self, start: int) -> None:
        self._forget(start)
        self._files.remove(self._path(start))

    def release(self) -> None:
        """Close the descriptor of the file written last."""
        self._forget(self._descriptor_start)

    def destroy(self) -> None:
        """Remove the files and the directory."""
        self.release()
        if self._writable:
            for start in range(self._first, self._created, self._file_size):
                self._files.remove(self._path(start))
            with contextlib.suppress(OSError):  # not there, or not empty: not ours to remove
                os.rmdir(self._directory)
        self._first = self._created = self._end = self._flushed = 0

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, address: int) -> ExtUnit | None:
        """The unit at `address`; None when there is none, or when its bytes are not a unit."""
        position = address - FIRST_ADDRESS
        if not self.is_ext_address(address) or not self._first <= position <= self._end - UNIT.size:
            return None
        at = position % self._file_size
        with self._opened(position - at) as descriptor:
            data = os.pread(descriptor, min(256, self._file_size - at), at)
            length = int.from_bytes(data[:2], "big")
            if length > len(data):
                data = os.pread(descriptor, min(length, self._file_size - at), at)
        if not _unit_size(data, 0):
            return None
        _, tags_code, store_timestamp, _ = UNIT.unpack_from(data)
        return ExtUnit(tags_code, store_timestamp, data[UNIT.size : length])


def _unit_size(data: bytes, at: int) -> int:
    """The size of the unit at `at`; 0 when there is no whole, consistent one."""
    if len(data) - at < UNIT.size:
        return 0
    length, _, _, bitmap_size = UNIT.unpack_from(data, at)
    if length < UNIT.size or bitmap_size != length - UNIT.size or at + length > len(data):
        return 0
    return int(length)
