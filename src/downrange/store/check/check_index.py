"""Compares the key index with the log. Part of `check`."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from downrange.model.hashing import HashCache, java_hash_unsigned
from downrange.model.message import PhysicalOffset
from downrange.model.properties import find_in_bytes
from downrange.store.check.directory import StoreDirectory, StoreState
from downrange.store.check.index_shape import IndexShape, shape_of
from downrange.store.index.index_file import ENTRY, HEADER, IndexFile
from downrange.store.index.key_hashes import positive_hash
from downrange.store.log.walk import WalkedRecord

_ROLLBACK: Final = 12
_MAX_INT: Final = 0x7FFFFFFF
REBUILD_INDEX: Final = "stop the broker and move the directory index away: the next start builds it again"

_UNKNOWN: Final = IndexShape(0, 0)


class IndexEntry(NamedTuple):
    """One entry, the file it stands in, and its number there."""

    file: FoundIndexFile
    number: int
    key_hash: int
    physical_offset: PhysicalOffset
    seconds: int
    before: int
    """Number of the entry before in its chain."""


class FoundIndexFile(IndexFile):
    """One index file with its header, as it was when the check began."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self.name = name
        self.read_header()


class IndexCheck:
    """Compares index and log side by side, for both are in one order: `add` every record, then `finish`."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._problems = directory.problems
        self._topics = HashCache(20_000, suffix="#")
        self._shape = self._find_shape()
        self.files = 0
        self.bytes = 0
        self.keys = 0
        self.lagging = 0
        """Messages of the log whose keys are not in the index yet, and will be."""
        self._found = [found for path in directory.index_files if (found := self._open(path)) is not None]
        self._reached_index = False
        # The next entry stands in the first of these, which is mapped, and has this number there.
        self._files = list(reversed(self._found))
        self._number = 1
        self._mapped: mmap.mmap | None = None
        self._newest = array("i")  # slot -> number of the newest entry of its chain so far
        self._last_offset = -1  # that the entry before points at
        self._last_in_file: int | None = None
        self._next = self._read()

    def _find_shape(self) -> IndexShape:
        """The shape of the files of the most common length: one index is written with one."""
        by_size: dict[int, list[Path]] = {}
        for path in self._directory.index_files:
            by_size.setdefault(path.stat().st_size, []).append(path)
        most_common_first = sorted(by_size.values(), key=len, reverse=True)
        return next((shape for paths in most_common_first if (shape := shape_of(paths)) is not None), _UNKNOWN)

    def _open(self, path: Path) -> FoundIndexFile | None:
        name = self._directory.name_of(path)
        size = path.stat().st_size
        if size == 0 and path == self._directory.index_files[-1]:
            if self._directory.state is StoreState.STOPPED:
                self._problems.add(name, "size", "is empty", "the next start removes it")
            return None
        if self._shape == _UNKNOWN and size > HEADER.size and FoundIndexFile(path, name).next_entry == 1:
            return None  # no entry was written yet: there is nothing to compare
        if size != self._shape.file_size:
            what = f"{path.name} has {size} bytes, which no number of slots and entries explains"
            if self._shape != _UNKNOWN:
                what = f"{path.name} has {size} bytes, but the others have {self._shape.file_size}"
            self._problems.add("index", "size", what, REBUILD_INDEX)
            return None
        self.files += 1
        self.bytes += size
        found = FoundIndexFile(path, name)
        if found.next_entry > self._shape.entries:
            self._problems.add(name, "header", f"says {found.next_entry - 1} entries", REBUILD_INDEX)
            found.next_entry = self._shape.entries
        return found

    # Every entry, in order; chains and slots are checked on the way.

    def _read(self) -> IndexEntry | None:
        """The next entry that does not go back in the log."""
        while self._files:
            file = self._files[-1]
            if self._mapped is None:
                with file.path.open("rb") as stream:
                    self._mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                self._newest = array("i", bytes(4 * self._shape.slots))
                self._number, self._last_in_file = 1, None
            if self._number >= file.next_entry:
                self._close(file, self._mapped)
                continue
            at = HEADER.size + 4 * self._shape.slots + self._number * ENTRY.size
            entry = IndexEntry(file, self._number, *ENTRY.unpack_from(self._mapped, at))
            if entry.physical_offset >= self._last_offset:
                return entry
            what = f"entry {entry.number} points at {entry.physical_offset}, the one before behind it"
            self._problems.add(file.name, "order", what, REBUILD_INDEX)
            self._pass(entry)
        return None

    def _close(self, file: FoundIndexFile, mapped: mmap.mmap) -> None:
        """All entries of a file were read."""
        if not self._directory.is_live:
            if self._last_in_file is not None and self._last_in_file != file.end_offset:
                what = f"says that it ends with the message at {file.end_offset}, it does with {self._last_in_file}"
                self._problems.add(file.name, "header", what, REBUILD_INDEX)
            self._check_slots(file, mapped, self._newest)
        mapped.close()
        self._mapped = None
        self._files.pop()

    def _pass(self, entry: IndexEntry) -> None:
        """Look at the chain of an entry, and go on behind it."""
        slot = entry.key_hash % self._shape.slots
        if entry.key_hash < 0 or entry.before != self._newest[slot]:
            what = f"entry {entry.number} is followed by entry {entry.before}, not {self._newest[slot]}, in its chain"
            self._problems.add(entry.file.name, "chain", what, REBUILD_INDEX)
        self._newest[slot] = entry.number
        self._number += 1
        self.keys += 1

    def _take(self, entry: IndexEntry) -> IndexEntry | None:
        """Go on to the next entry: the present one was compared, or waits for its record."""
        self._pass(entry)
        self._last_offset = self._last_in_file = entry.physical_offset
        self._next = self._read()
        return self._next

    def _check_slots(self, file: FoundIndexFile, mapped: mmap.mmap, newest: array[int]) -> None:
        stored = array("i", mapped[HEADER.size : HEADER.size + 4 * len(newest)])
        stored.byteswap()
        if stored == newest:
            return
        for slot, (is_number, number) in enumerate(zip(stored, newest, strict=True)):
            # A crash can leave slots that name entries behind the end; whoever reads them takes them for empty.
            if is_number != number and not (
                self._directory.state is StoreState.CRASHED and is_number >= file.next_entry
            ):
                what = f"slot {slot} names entry {is_number}, the newest of its chain is {number}"
                self._problems.add(file.name, "slot", what, REBUILD_INDEX)

    # The keys that the records of the log have.

    def add(self, record: WalkedRecord, is_damaged: Callable[[PhysicalOffset], bool]) -> None:
        """Compare the keys of the next record of the log with the next entries of the index."""
        physical_offset = record.physical_offset
        entry = self._next
        while entry is not None and entry.physical_offset < physical_offset:
            self._points_nowhere(entry, is_damaged)
            entry = self._take(entry)
        expected = set() if record.sys_flag & _ROLLBACK == _ROLLBACK else self._hashes(record.topic, record.properties)
        if entry is None:
            if expected and self._found:
                self._behind_the_index(record)
            return
        if entry.physical_offset > physical_offset:
            if expected and self._reached_index:
                what = f"keys of the message at {physical_offset} are not in the index"
                self._problems.add("index", "missing", what, REBUILD_INDEX)
            return
        self._reached_index = True
        hashes = set()
        while entry is not None and entry.physical_offset == physical_offset:
            hashes.add(entry.key_hash)
            self._compare(entry, record.store_timestamp)
            entry = self._take(entry)
        if hashes - expected:
            what = f"an entry points at {physical_offset}, a record that has no such key"
            self._problems.add("index", "key", what, REBUILD_INDEX)
        if expected - hashes and not (entry is None and self._may_lag()):
            what = f"{len(expected - hashes)} keys of the message at {physical_offset} are not in the index"
            self._problems.add("index", "missing", what, REBUILD_INDEX)

    def finish(self, is_damaged: Callable[[PhysicalOffset], bool]) -> None:
        """The log is read: the entries that remain point behind its end."""
        while self._next is not None:
            if not self._directory.is_live:
                self._points_nowhere(self._next, is_damaged)
            self._take(self._next)

    def _points_nowhere(self, entry: IndexEntry, is_damaged: Callable[[PhysicalOffset], bool]) -> None:
        if entry.physical_offset >= self._directory.segments.min_offset and not is_damaged(entry.physical_offset):
            what = f"entry {entry.number} points at {entry.physical_offset}, where no record begins"
            self._problems.add(entry.file.name, "record", what, REBUILD_INDEX)
        self._reached_index = True

    def _behind_the_index(self, record: WalkedRecord) -> None:
        if self._may_lag():
            self.lagging += 1
        else:
            what = f"it ends before the message at {record.physical_offset}"
            self._problems.add("index", "end", what, "the next start adds what is missing")

    def _may_lag(self) -> bool:
        return self._directory.state is not StoreState.STOPPED

    def _compare(self, entry: IndexEntry, timestamp: int) -> None:
        file = entry.file
        if entry.number == 1:
            # Its seconds are counted from the file before: they say nothing.
            if (file.begin_timestamp, file.begin_offset) != (timestamp, entry.physical_offset):
                self._problems.add(file.name, "begin", "does not begin where its header says", REBUILD_INDEX)
            return
        seconds = min(max(0, (timestamp - file.begin_timestamp) // 1000), _MAX_INT)
        if entry.seconds != seconds:
            what = f"entry {entry.number} is {entry.seconds} seconds after the begin of its file, its message {seconds}"
            self._problems.add(file.name, "seconds", what, REBUILD_INDEX)

    def _hashes(self, topic: bytes, properties: bytes) -> set[int]:
        """The hashes of a message's keys as the index keeps them."""
        unique, keys = find_in_bytes(properties, b"UNIQ_KEY"), find_in_bytes(properties, b"KEYS")
        if not unique and not keys:
            return set()
        start = self._topics[topic.decode("utf-8", "replace")]
        words = [unique] if unique else []
        if keys:
            words += [word for word in keys.split(b" ") if word]
        return {positive_hash(java_hash_unsigned(word.decode("utf-8", "replace"), start)) for word in words}
