"""The key index: finds messages by topic, key and time; see docs/formats/key-index.md.

A file is a hash table on disk: a slot points at the newest entry of its chain, an entry at the entry before it. The
index has 32-bit hashes, not keys: the client compares the keys of the messages that are found.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from downrange.compiled import accelerated
from downrange.model.message import PhysicalOffset
from downrange.store.errors import StoreClosed
from downrange.store.files import Files
from downrange.store.index.index_directory import IndexDirectory
from downrange.store.index.index_file import ENTRY, SLOT, IndexFile
from downrange.store.index.key_hashes import KeyHashes, positive_hash
from downrange.store.new_messages import Keyed, NewMessages

_MAPPED_FILES: Final = 4  # older files that stay mapped after a query
_pack_slot, _pack_entry = SLOT.pack_into, ENTRY.pack_into
_unpack_slot, _unpack_entry = SLOT.unpack_from, ENTRY.unpack_from


@accelerated
def index_keys(
    messages: NewMessages,
    number: int,
    stop: int,
    memory: mmap.mmap,
    slots: int,
    next_entry: int,
    limit: int,
    used_slots: int,
    end_offset: int,
) -> tuple[int, int, int, int] | None:
    """Put the keys of messages from `number` to `stop` into one index file, and move its header on.

    Return the next entry, the used slots, the end offset and the end timestamp of the file. None: nothing was put,
    because the keys do not fit this file or are unusual. Python leaves that to `KeyIndex.put_keys` always.
    """
    return None


class IndexQuery(NamedTuple):
    """The offsets that a lookup found, newest file first, and the last offset and time in the index."""

    physical_offsets: list[PhysicalOffset]
    last_update_timestamp: int
    last_update_physical_offset: PhysicalOffset


class KeyIndex:
    """All index files of a store, oldest first; the last one takes new keys and is always mapped.

    Holds always: all files but the last are full. One thread puts and queries; `flush` may run in another.
    """

    def __init__(
        self,
        directory: Path,
        slots: int,
        entries: int,
        files: Files,
        clock_now: Callable[[], int],
        *,
        writable: bool = True,
    ) -> None:
        self._directory = IndexDirectory(directory, slots, entries, files, clock_now, writable=writable)
        self._slots = slots
        self._entries = entries
        self._entries_at = self._directory.entries_at
        self._writable = writable
        self._index_files: list[IndexFile] = []
        self._current: IndexFile | None = None  # the last file, while it is mapped for writing
        self._queried: deque[IndexFile] = deque()  # older files that are mapped, the least recently used first
        self._filled: deque[IndexFile] = deque()  # full files that are not synced yet
        self._hashes = KeyHashes()
        self.safe_timestamp = 0
        """The store time up to which the index survives a crash: the end of the last full, synced file."""

    def __repr__(self) -> str:
        used = self._index_files[-1].next_entry - 1 if self._index_files else 0
        return f"<KeyIndex {self._directory.path} {len(self._index_files)} files, {used} entries in the last>"

    # -- opening -------------------------------------------------------------------------------------------------------

    def load(self, drop_newer_than: int | None = None) -> None:
        """Read the headers of all files; after a crash remove files that were not synced by `drop_newer_than`."""
        self._unmap_all()
        self._filled.clear()
        self._index_files = []
        is_safe = True
        for path in self._directory.paths():
            index_file = IndexFile(path)
            index_file.read_header()
            # A damaged count is only a count. But it must fit its field, and grow.
            index_file.used_slots = min(max(0, index_file.used_slots), self._slots)
            if drop_newer_than is not None:
                is_safe = is_safe and self._was_synced(index_file, drop_newer_than)
            if is_safe:
                self._index_files.append(index_file)
            elif self._writable:
                self._directory.remove(path)
        if self._index_files and self._index_files[-1].next_entry <= 1:
            # A process died between creating this file and indexing its first message. Its header may not say where the
            # file before ended, and then all messages would be indexed again.
            empty = self._index_files.pop()
            if self._writable:
                self._directory.remove(empty.path)
        if self._index_files and self._writable:
            self._directory.take_back_uncounted(self._index_files[-1])
        full = [one.end_timestamp for one in self._index_files if one.next_entry >= self._entries]
        self.safe_timestamp = max(full, default=0)

    def _was_synced(self, index_file: IndexFile, safe_timestamp: int) -> bool:
        """Whether this file was synced when it was full. Of files that end in the millisecond of the checkpoint only
        the first certainly was; and a header that never reached the disk has no entries."""
        previous = self._index_files[-1].end_timestamp if self._index_files else -1
        return index_file.next_entry >= self._entries and previous < safe_timestamp >= index_file.end_timestamp

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, messages: NewMessages, number: int, stop: int) -> None:
        """Index messages that lie in the log, from `number` to `stop`."""
        one = self._current
        if one is not None and one.map is not None:
            put = index_keys(
                messages, number, stop, one.map, self._slots, one.next_entry, one.limit, one.used_slots, one.end_offset
            )
            if put is not None:
                if put[0] > one.next_entry:
                    one.next_entry, one.used_slots, one.end_offset, one.end_timestamp = put
                return
        keyed = messages.keyed(number, stop)
        if keyed:
            self.put_keys(keyed)

    def put_keys(self, keyed: Sequence[Keyed]) -> None:
        """Index messages by their unique ids and by each word of their KEYS; messages indexed before are passed over.

        The header follows once, at the end: entries that it does not count yet are taken back by `load`.
        """
        index_file = self._current or self._writable_file()
        last_timestamp = -1
        for key_hash, physical_offset, store_timestamp in self._hashes.of_messages(keyed):
            if index_file.next_entry >= index_file.limit:
                if index_file.map is not None:
                    index_file.write_header(index_file.map)
                index_file = self._writable_file()
                last_timestamp = -1
            if physical_offset < index_file.end_offset:
                continue
            mapped = index_file.map
            assert mapped is not None
            number = index_file.next_entry
            slot_at = 40 + key_hash % self._slots * 4
            (before,) = _unpack_slot(mapped, slot_at)
            if before <= 0 or before > number:
                before = 0
                index_file.used_slots += 1
            if store_timestamp != last_timestamp or number == 2:  # the first entry says when the file begins
                seconds, last_timestamp = index_file.seconds_at(store_timestamp), store_timestamp
            _pack_entry(mapped, self._entries_at + number * 20, key_hash, physical_offset, seconds, before)
            _pack_slot(mapped, slot_at, number)
            if number == 1:
                # Only now, after the seconds were counted from the end of the file before: this is RocketMQ's order.
                index_file.begin_offset = physical_offset
                index_file.begin_timestamp = store_timestamp
            index_file.next_entry = number + 1
            index_file.end_offset = physical_offset
            index_file.end_timestamp = store_timestamp
        if index_file.map is not None:
            index_file.write_header(index_file.map)

    def _writable_file(self) -> IndexFile:
        """The last file, mapped and with room for an entry; a new file if there is none."""
        if not self._writable:
            raise StoreClosed(f"{self._directory.path} is open for reading only")
        last = self._index_files[-1] if self._index_files else None
        if last is None or last.next_entry >= self._entries:
            index_file = self._directory.create(last)
            self._index_files.append(index_file)
            if last is not None:
                if last.map is not None:
                    self._remember(last)
                self._filled.append(last)
            last = index_file
        with contextlib.suppress(ValueError):  # perhaps a query has mapped it
            self._queried.remove(last)
        self._directory.map(last)
        if last.next_entry >= last.limit:
            self._directory.reserve(last)
        self._current = last
        return last

    @property
    def needs_flush(self) -> bool:
        """Whether a file became full since the last `flush`."""
        return bool(self._filled)

    def flush(self) -> bool:
        """Sync files that became full, and move `safe_timestamp`; return whether there was one. For a worker thread.

        Only `close` syncs the last file: after a crash it is dropped and filled again from the commit log.
        """
        synced = False
        while self._filled:
            index_file = self._filled[0]
            self._directory.sync(index_file)
            self.safe_timestamp = max(self.safe_timestamp, index_file.end_timestamp)
            self._filled.popleft()
            synced = True
        return synced

    def delete_expired(self, min_offset: PhysicalOffset) -> int:
        """Remove leading files that only point before `min_offset`, but never the last; return how many."""
        removed = 0
        while self._writable and len(self._index_files) > 1 and self._index_files[0].end_offset < min_offset:
            oldest = self._index_files[0]
            with contextlib.suppress(ValueError):
                self._queried.remove(oldest)
            oldest.unmap()
            self._directory.remove(oldest.path)
            del self._index_files[0]
            removed += 1
        return removed

    def close(self) -> None:
        """Sync and unmap all files; the index may be used again afterwards."""
        if self._writable:
            self.flush()
            if self._current is not None:
                self._directory.sync(self._current)
        self._unmap_all()

    def destroy(self) -> None:
        """Remove all files."""
        self._unmap_all()
        self._filled.clear()
        if self._writable:
            for index_file in self._index_files:
                self._directory.remove(index_file.path)
        self._index_files = []
        self.safe_timestamp = 0

    # -- reading -------------------------------------------------------------------------------------------------------

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> IndexQuery:
        """Physical offsets of at most `max_num` messages with this key's hash, stored from `begin` to `end`."""
        found: list[PhysicalOffset] = []
        if not self._index_files:
            return IndexQuery(found, 0, PhysicalOffset(0))
        key_hash = positive_hash(self._hashes.of_key(topic, key))
        for index_file in reversed(self._index_files):
            if begin <= index_file.end_timestamp and end >= index_file.begin_timestamp:
                self._collect(index_file, key_hash, max_num, begin, end, found)
            if index_file.begin_timestamp < begin or len(found) >= max_num:
                break
        newest = self._index_files[-1]
        return IndexQuery(found, newest.end_timestamp, PhysicalOffset(newest.end_offset))

    def _collect(
        self, index_file: IndexFile, key_hash: int, max_num: int, begin: int, end: int, found: list[PhysicalOffset]
    ) -> None:
        """Walk one chain, only to entries with smaller numbers: so a damaged file cannot make us run in circles."""
        source = self._directory.map(index_file)
        if index_file is not self._current:
            self._remember(index_file)
        (number,) = _unpack_slot(source, 40 + key_hash % self._slots * 4)
        limit = min(index_file.next_entry, self._entries)
        while 0 < number < limit and len(found) < max_num:
            entry_hash, physical_offset, seconds, before = _unpack_entry(source, self._entries_at + number * 20)
            if seconds < 0:
                break
            store_time = index_file.begin_timestamp + seconds * 1000
            if entry_hash == key_hash and begin <= store_time <= end:
                found.append(physical_offset)
            if store_time < begin or before >= number:
                break
            number = before

    # -- mappings ------------------------------------------------------------------------------------------------------

    def _remember(self, index_file: IndexFile) -> None:
        """Note that an older file was used just now, and unmap the least recently used one if there are too many."""
        with contextlib.suppress(ValueError):
            self._queried.remove(index_file)
        self._queried.append(index_file)
        if len(self._queried) > _MAPPED_FILES:
            self._queried.popleft().unmap()

    def _unmap_all(self) -> None:
        for index_file in self._index_files:
            index_file.unmap()
        self._queried.clear()
        self._current = None
