"""Do the key index and the log say the same? Part of `check`."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from downrange.model.hashing import HashCache, java_hash_unsigned
from downrange.store.directory import StoreDirectory, StoreState
from downrange.store.dispatcher import find_in
from downrange.store.index_file import ENTRY, HEADER
from downrange.store.key_hashes import positive_hash
from downrange.store.walk import WalkedRecord

_ROLLBACK: Final = 12
_BATCH: Final = 4096
_MAX_INT: Final = 0x7FFFFFFF
REBUILD_INDEX: Final = "stop the broker and move the directory index away: the next start builds it again"


class IndexEntry(NamedTuple):
    """One entry, the file it stands in, and its number there."""

    file: FoundIndexFile
    number: int
    key_hash: int
    physical_offset: int
    seconds: int


class FoundIndexFile:
    """One index file with its header, as it was when the check began."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        with path.open("rb") as stream:
            header = HEADER.unpack(stream.read(HEADER.size))
        self.begin_timestamp, self.end_timestamp, self.begin_offset, self.end_offset = header[:4]
        self.used_slots = header[4]
        self.next_entry = max(1, header[5])


class IndexCheck:
    """Compares index and log side by side, for both are in the same order: offer it every record, then `finish`."""

    def __init__(self, directory: StoreDirectory) -> None:
        self._directory = directory
        self._problems = directory.problems
        self._shape = directory.index_shape
        self._topics = HashCache(20_000, suffix="#")
        self.files = 0
        self.bytes = 0
        self.keys = 0
        self.lagging = 0
        """Messages of the log whose keys are not in the index yet, and will be."""
        self._found = [found for path in directory.index_files if (found := self._open(path)) is not None]
        self._entries = self._all_entries()
        self._next: IndexEntry | None = next(self._entries, None)
        self._reached_index = False

    def _open(self, path: Path) -> FoundIndexFile | None:
        name = self._directory.name_of(path)
        size = path.stat().st_size
        if size == 0 and path == self._directory.index_files[-1]:
            if self._directory.state is StoreState.STOPPED:
                self._problems.add(name, "size", "is empty", "the next start removes it")
            return None
        if size != self._shape.file_size:
            shape = f"{self._shape.slots} slots and {self._shape.entries} entries make {self._shape.file_size}"
            what = f"has {size} bytes, but {shape}"
            remedy = (
                "say how it was written with --index-slots and --index-entries, or -c broker.conf; it was not checked"
            )
            self._problems.add("index", "size", f"{path.name} {what}", remedy)
            return None
        self.files += 1
        self.bytes += size
        found = FoundIndexFile(path, name)
        if found.next_entry > self._shape.entries:
            self._problems.add(name, "header", f"says {found.next_entry - 1} entries", REBUILD_INDEX)
            found.next_entry = self._shape.entries
        return found

    # Every entry, in order; chains and slots are checked on the way.

    def _all_entries(self) -> Iterator[IndexEntry]:
        for file in self._found:
            with file.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                yield from self._entries_of(file, mapped)

    def _entries_of(self, file: FoundIndexFile, mapped: mmap.mmap) -> Iterator[IndexEntry]:
        slots = self._shape.slots
        base = HEADER.size + 4 * slots
        newest = array("i", bytes(4 * slots))  # slot -> number of the newest entry of its chain so far
        for first in range(1, file.next_entry, _BATCH):
            last = min(first + _BATCH, file.next_entry)
            block = mapped[base + first * ENTRY.size : base + last * ENTRY.size]
            for number, (key_hash, physical_offset, seconds, before) in enumerate(ENTRY.iter_unpack(block), first):
                slot = key_hash % slots
                if key_hash < 0 or before != newest[slot]:
                    what = f"entry {number} is followed by entry {before}, not {newest[slot]}, in its chain"
                    self._problems.add(file.name, "chain", what, REBUILD_INDEX)
                newest[slot] = number
                self.keys += 1
                yield IndexEntry(file, number, key_hash, physical_offset, seconds)
        if not self._directory.is_live:
            self._check_slots(file, mapped, newest)

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

    # The same keys, out of the log.

    def add(self, record: WalkedRecord, is_damaged: Callable[[int], bool]) -> None:
        """Compare the keys of the next record of the log with the next entries of the index."""
        physical_offset, _, topic, _, _, sys_flag, timestamp, properties = record
        entry = self._next
        while entry is not None and entry.physical_offset < physical_offset:
            self._points_nowhere(entry, is_damaged)
            entry = self._next = self._advance(entry)
        expected = set() if sys_flag & _ROLLBACK == _ROLLBACK else self._hashes(topic, properties)
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
            self._compare(entry, timestamp)
            entry = self._next = self._advance(entry)
        if hashes - expected:
            what = f"an entry points at {physical_offset}, a record that has no such key"
            self._problems.add("index", "key", what, REBUILD_INDEX)
        if expected - hashes and not (entry is None and self._may_lag()):
            what = f"{len(expected - hashes)} keys of the message at {physical_offset} are not in the index"
            self._problems.add("index", "missing", what, REBUILD_INDEX)

    def finish(self, is_damaged: Callable[[int], bool]) -> None:
        """The log is read: what is left of the index points behind its end."""
        while self._next is not None:
            if not self._directory.is_live:
                self._points_nowhere(self._next, is_damaged)
            self._next = self._advance(self._next)

    def _advance(self, entry: IndexEntry) -> IndexEntry | None:
        """The entry after this one that does not go back in the log."""
        following = next(self._entries, None)
        while following is not None and following.physical_offset < entry.physical_offset:
            what = f"entry {following.number} points at {following.physical_offset}, the one before behind it"
            self._problems.add(following.file.name, "order", what, REBUILD_INDEX)
            following = next(self._entries, None)
        if following is None or following.file is not entry.file:
            file = entry.file
            if not self._directory.is_live and file.end_offset != entry.physical_offset:
                what = f"says that it ends with the message at {file.end_offset}, it does with {entry.physical_offset}"
                self._problems.add(file.name, "header", what, REBUILD_INDEX)
        return following

    def _points_nowhere(self, entry: IndexEntry, is_damaged: Callable[[int], bool]) -> None:
        if entry.physical_offset >= self._directory.segments.min_offset and not is_damaged(entry.physical_offset):
            what = f"entry {entry.number} points at {entry.physical_offset}, where no record begins"
            self._problems.add(entry.file.name, "record", what, REBUILD_INDEX)
        self._reached_index = True

    def _behind_the_index(self, record: WalkedRecord) -> None:
        if self._may_lag():
            self.lagging += 1
        else:
            what = f"it ends before the message at {record[0]}"
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
        unique, keys = find_in(properties, b"UNIQ_KEY\x01"), find_in(properties, b"KEYS\x01")
        if not unique and not keys:
            return set()
        start = self._topics[topic.decode("utf-8", "replace")]
        words = [unique] if unique else []
        if keys:
            words += [word for word in keys.split(b" ") if word]
        return {positive_hash(java_hash_unsigned(word.decode("utf-8", "replace"), start)) for word in words}
