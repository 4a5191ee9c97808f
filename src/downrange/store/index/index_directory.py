"""The directory of the key index: its files, their sizes, and how they are created and removed."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from downrange.store.errors import StoreCorrupt, StoreError
from downrange.store.files import Files, opened
from downrange.store.index.index_file import ENTRY, HEADER, SLOT, IndexFile

_RESERVED_ENTRIES: Final = 50_000  # a megabyte


class IndexDirectory:
    """Reads and writes files for `KeyIndex`, which knows which of them belong to the index.

    Holds always: the order of names is the order of the files, which all have the same size. `sync` may run in a
    worker thread.
    """

    def __init__(
        self, path: Path, slots: int, entries: int, files: Files, clock_now: Callable[[], int], *, writable: bool
    ) -> None:
        if slots < 1 or entries < 2:
            raise StoreError(f"an index file needs at least 1 slot and 2 entries, not {slots} and {entries}")
        self.path = path
        self.entries_at = HEADER.size + SLOT.size * slots
        """The position of the first entry in a file."""
        self._slots = slots
        self._entries = entries
        self._file_size = self.entries_at + ENTRY.size * entries
        self._files = files
        self._clock_now = clock_now
        self._writable = writable

    def __repr__(self) -> str:
        return f"<IndexDirectory {self.path}>"

    def paths(self) -> list[Path]:
        """The files in order; raises StoreCorrupt when there is a file that does not belong to the index."""
        try:
            with os.scandir(self.path) as listing:
                found = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        paths = []
        for entry in found:
            if len(entry.name) != 17 or not (entry.name.isdecimal() and entry.name.isascii()) or not entry.is_file():
                raise StoreCorrupt(f"{entry.path} does not belong here: only files named by 17 digits do; move it away")
            size = entry.stat().st_size
            if size == 0 and entry is found[-1]:
                # After a crash between creating the file and setting its size the file is empty.
                if self._writable:
                    self._files.remove(Path(entry.path))
                break
            if size != self._file_size:
                raise StoreCorrupt(
                    f"{entry.path} has {size} bytes, but {self._slots} slots and {self._entries} entries make"
                    f" {self._file_size}: restore maxHashSlotNum and maxIndexNum, or move the index directory away"
                    " (older messages can then not be found by key)"
                )
            paths.append(Path(entry.path))
        return paths

    def create(self, last: IndexFile | None) -> IndexFile:
        """Create the file after the last one, mapped, with disk blocks for the first entries."""
        index_file = IndexFile(self.path / self._new_name(last))
        if last is not None:
            index_file.begin_timestamp = index_file.end_timestamp = max(0, last.end_timestamp)
            index_file.begin_offset = index_file.end_offset = max(0, last.end_offset)
        try:
            self._files.create(index_file.path, self._file_size)
            mapped = self.map(index_file)
            self.reserve(index_file)
        except OSError:  # perhaps the disk is full: leave no empty file behind
            index_file.unmap()
            self._files.remove(index_file.path)
            raise
        index_file.write_header(mapped)
        return index_file

    def _new_name(self, last: IndexFile | None) -> str:
        """The present local time, or one later than the last name, because files are sorted by name."""
        now = self._clock_now()
        name = int(time.strftime("%Y%m%d%H%M%S", time.localtime(now // 1000)) + f"{now % 1000:03d}")
        if last is not None:
            name = max(name, int(last.path.name) + 1)
        return f"{name:017d}"

    def reserve(self, index_file: IndexFile) -> None:
        """Reserve disk blocks for the next entries: on a full disk, writing to a page without one kills the process."""
        limit = min(index_file.next_entry + _RESERVED_ENTRIES, self._entries)
        with opened(self._files, index_file.path) as descriptor:
            if not index_file.limit:
                self._files.reserve(descriptor, 0, self.entries_at)
            position = self.entries_at + index_file.next_entry * ENTRY.size
            self._files.reserve(descriptor, position, (limit - index_file.next_entry) * ENTRY.size)
        index_file.limit = limit

    def map(self, index_file: IndexFile) -> mmap.mmap:
        if index_file.map is None:
            with opened(self._files, index_file.path, writable=self._writable) as descriptor:
                mapped = self._files.map(descriptor, self._file_size, writable=self._writable)
            mapped.madvise(mmap.MADV_RANDOM)  # read-ahead would read useless pages
            index_file.map = mapped
        return index_file.map

    def take_back_uncounted(self, index_file: IndexFile) -> None:
        """Remove entries that the header does not count, which a process left that died inside `put`.

        Slots may point at such entries. New entries would overwrite them, and the chains of older keys would be lost.
        """
        with opened(self._files, index_file.path) as descriptor:
            taken_back = []
            for number in range(index_file.next_entry, self._entries):
                raw = os.pread(descriptor, ENTRY.size, self.entries_at + number * ENTRY.size)
                if raw == bytes(ENTRY.size):
                    break
                taken_back.append((number, ENTRY.unpack(raw)))
            for number, (key_hash, _, _, before) in reversed(taken_back):
                slot_at = HEADER.size + key_hash % self._slots * SLOT.size
                if SLOT.unpack(os.pread(descriptor, SLOT.size, slot_at)) == (number,):
                    self._files.write_at(descriptor, SLOT.pack(before), slot_at)
                self._files.write_at(descriptor, bytes(ENTRY.size), self.entries_at + number * ENTRY.size)

    def sync(self, index_file: IndexFile) -> None:
        with suppress(FileNotFoundError), opened(self._files, index_file.path) as descriptor:  # it may have expired
            self._files.sync(descriptor)
            self._files.sync_directory(self.path)

    def remove(self, path: Path) -> None:
        self._files.remove(path)
