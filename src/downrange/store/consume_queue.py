"""The consume queue: 20-byte entries that say where the messages of one topic queue lie in the commit log.

Entry n stands at logical byte 20·n of a run of equal files; see docs/formats/consume-queue.md. Everything here can be
rebuilt from the commit log, so a doubtful tail is cut, never repaired.

A broker may have 40,000 of these, most of them idle. So there is no mapping: new entries gather in a `bytearray` until
`write_pending` writes them in one go, an idle queue is a handful of numbers, and only a busy one keeps a descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from downrange.store.errors import StoreClosed, StoreCorrupt, StoreError
from downrange.store.files import Files

log = logging.getLogger(__name__)

# One entry: physical offset, record size, tags code. See docs/formats/consume-queue.md.
ENTRY: Final = struct.Struct(">qiq")
ENTRY_SIZE: Final = 20
assert ENTRY.size == ENTRY_SIZE
_pack = ENTRY.pack

# Stands where a queue has no message: before the first entry of a queue that did not begin at 0.
BLANK: Final = ENTRY.pack(0, 0x7FFFFFFF, 0)
PAGE_SIZE: Final = 4096  # the unit of "least pages", whatever the machine's own is

_SPILL_BYTES: Final = 16_380  # entries kept in memory, written or not: enough for every consumer that keeps up
_HOT_BYTES: Final = 1_000  # as much to write at once makes it worth keeping the descriptor
_FIRST_BLOCK: Final = 4_080
_BLOCK: Final = 65_520

_REBUILD: Final = "move the whole consumequeue directory away: the broker builds it again from the commit log"


class ConsumeQueue:
    """The entries of one topic queue, in order.

    Always: `min_offset <= max_offset`; what was written lies in files without gaps; entries after the end are zero on
    disk, so that what was cut off cannot come back. One thread puts, reads and cuts; `flush` may run beside it in
    another one, but not beside `load`, `recover`, `truncate` or `destroy`.
    """

    __slots__ = (
        "_created",
        "_descriptor",
        "_descriptor_start",
        "_directory",
        "_end",
        "_file_size",
        "_files",
        "_first",
        "_flushed",
        "_last_read",
        "_min",
        "_named",
        "_spill_at",
        "_tail",
        "_tail_start",
        "_writable",
        "_written",
        "max_physical_offset",
        "queue_id",
        "topic",
    )

    def __init__(
        self, directory: Path, topic: str, queue_id: int, file_size: int, files: Files, *, writable: bool = True
    ) -> None:
        if file_size <= 0 or file_size % ENTRY_SIZE:
            raise StoreError(f"a consume queue file has a multiple of {ENTRY_SIZE} bytes, not {file_size}")
        self.topic = topic
        self.queue_id = queue_id
        self._directory = str(directory)  # a fifth of a Path, forty thousand times
        self._file_size = file_size
        self._files = files
        self._writable = writable
        self._descriptor = -1
        self._descriptor_start = -1
        self._reset(0)

    def _reset(self, start: int) -> None:
        """No files and no entries, the next file beginning at logical byte `start`."""
        self._first = self._created = start  # the files that exist cover [_first, _created)
        self._end = self._written = self._flushed = self._min = start
        self._named = start  # the files before have their names safely in the directory
        self._tail: bytearray | None = None  # holds [_tail_start, _end); part of it may be written already
        self._tail_start = start
        self._spill_at = 0
        self._last_read = -1
        self.max_physical_offset = 0
        """Where the record of the last entry ends in the commit log; 0 when there is none."""

    def __repr__(self) -> str:
        pending = (self._end - self._written) // ENTRY_SIZE
        return f"<ConsumeQueue {self.topic}/{self.queue_id} {self.min_offset}..{self.max_offset}, {pending} pending>"

    @property
    def min_offset(self) -> int:
        """The first queue offset whose message is still in the commit log."""
        return self._min // ENTRY_SIZE

    @property
    def max_offset(self) -> int:
        """The queue offset the next message gets."""
        return self._end // ENTRY_SIZE

    @property
    def dirty_pages(self) -> int:
        """Pages that are not known to be on disk, whether written or still in memory."""
        return self._end // PAGE_SIZE - self._flushed // PAGE_SIZE

    @property
    def pending_bytes(self) -> int:
        """What waits in memory for `write_pending`."""
        return self._end - self._written

    @property
    def has_files(self) -> bool:
        return self._created > self._first

    @property
    def is_dirty(self) -> bool:
        return self._end > self._flushed

    @property
    def is_open(self) -> bool:
        """Whether this queue holds a descriptor, or entries in memory, that `release` would give back."""
        return self._descriptor >= 0 or self._tail is not None

    # -- opening -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """See which files there are. They count as full until `recover` has looked into them."""
        self.release()
        starts = file_starts(self._directory, self._file_size)
        self._reset(starts[0] if starts else 0)
        if starts:
            end = starts[-1] + self._file_size
            self._created = self._end = self._written = self._flushed = self._tail_start = self._named = end

    def recover(self, *, clean: bool = False) -> None:
        """Find the end: the first entry that is not valid, looking from the third-last file on.

        After a clean stop every file is full of valid entries up to the end, so a binary search finds the same place.
        """
        if self._created == self._first:
            return
        scanned = range(max(self._first, self._created - 3 * self._file_size), self._created, self._file_size)
        end = self._find_end_quickly(scanned) if clean else self._find_end(scanned)
        self._cut(end)
        if not clean:
            # A killed process may have left pages that were never synced: let the next flush see to them.
            self._flushed = self._named = min(scanned.start, end)
            if self._writable and end < self._created:
                self._zero_after(end)
        self.max_physical_offset = self._physical_end_before(end)

    def _find_end(self, scanned: range) -> int:
        for start in scanned:
            with self._opened(start) as descriptor:
                at, size = 0, _FIRST_BLOCK
                while at < self._file_size:
                    block = os.pread(descriptor, min(size, self._file_size - at), at)
                    valid = count_valid(block)
                    at += valid * ENTRY_SIZE
                    if valid * ENTRY_SIZE < len(block) or not block:
                        return start + at
                    size = _BLOCK
        return scanned.stop

    def _find_end_quickly(self, scanned: range) -> int:
        for start in reversed(scanned):
            low, high = 0, self._file_size // ENTRY_SIZE
            with self._opened(start) as descriptor:
                block = os.pread(descriptor, min(_FIRST_BLOCK, self._file_size), 0)
                valid = count_valid(block)
                if valid * ENTRY_SIZE < len(block):
                    low = high = valid
                while low < high:
                    middle = (low + high) // 2
                    if count_valid(os.pread(descriptor, ENTRY_SIZE, middle * ENTRY_SIZE)):
                        low = middle + 1
                    else:
                        high = middle
            if low:
                return start + low * ENTRY_SIZE
        return scanned.start

    def _cut(self, end: int) -> None:
        """Make `end` the end, everything before it being written; drop the files that begin at or after it."""
        self._tail = None
        self._last_read = -1
        if self._writable:
            keep = max(end, self._first + 1)  # an empty first file stays: it says where the numbering is
            while self._created - self._file_size >= keep:
                start = self._created - self._file_size
                self._forget(start)
                self._files.remove(self._path(start))
                self._created = start
            self._named = min(self._named, self._created)
        self._end = self._written = self._tail_start = end
        self._flushed = min(self._flushed, end)
        self._min = min(self._min, end)

    def _zero_after(self, end: int) -> None:
        """Zero what lies behind the end in its file: stale entries would count again once the end reached them."""
        start = end - end % self._file_size
        with self._opened(start) as descriptor:
            at = end - start
            while at < self._file_size:
                try:
                    at = os.lseek(descriptor, at, os.SEEK_DATA)
                except OSError:  # ENXIO: only the hole of a sparse file is left
                    break
                hole = os.lseek(descriptor, at, os.SEEK_HOLE)  # reading it would fill the page cache with zeros
                block = os.pread(descriptor, min(_BLOCK, hole - at), at)
                if block.strip(b"\0"):
                    self._files.write_at(descriptor, bytes(len(block)), at)
                at += len(block)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, queue_offset: int, physical_offset: int, size: int, tags_code: int) -> None:
        """Append the entry of one record; a record that was put before is silently passed over."""
        position = queue_offset * 20
        physical_end = physical_offset + size
        tail = self._tail
        if tail is None or position != self._end or physical_end <= self.max_physical_offset:
            tail = self._tail_for(position, physical_end)
            if tail is None:
                return
        tail += _pack(physical_offset, size, tags_code)
        self._end = position = position + 20
        self.max_physical_offset = physical_end
        if position >= self._spill_at:
            self._spill()

    def put_run(self, queue_offset: int, entries: bytes) -> None:
        """`put` for consecutive entries that are packed already, their records in the order of the log."""
        position = queue_offset * 20
        end = position + len(entries)
        physical_offset, size, _ = ENTRY.unpack_from(entries)
        if (
            self._tail is None
            or position != self._end
            or end > self._spill_at
            or physical_offset + size <= self.max_physical_offset
        ):
            for number, (physical_offset, size, tags_code) in enumerate(ENTRY.iter_unpack(entries)):
                self.put(queue_offset + number, physical_offset, size, tags_code)
            return
        self._tail += entries
        self._end = end
        physical_offset, size, _ = ENTRY.unpack_from(entries, len(entries) - 20)
        self.max_physical_offset = physical_offset + size
        if end >= self._spill_at:
            self._spill()

    def _tail_for(self, position: int, physical_end: int) -> bytearray | None:
        """The tail, ready for an entry at `position`; None when that entry is a duplicate."""
        if not self._writable:
            raise StoreClosed(f"{self._directory} is open for reading only")
        if position < self._end or physical_end <= self.max_physical_offset:
            return None
        if position - self._end >= self._file_size and self._created == self._first == self._end:
            self._reset(position - position % self._file_size)
        missing = position - self._end
        if missing >= self._file_size:
            raise StoreCorrupt(
                f"{self._directory} ends at queue offset {self.max_offset}, but the next message of the commit log is"
                f" number {position // ENTRY_SIZE}: files of this queue are missing; {_REBUILD}"
            )
        if self._tail is None:
            self._tail = bytearray()
            self._tail_start = self._written
            self._spill_at = self._next_spill(self._written)
        if missing:
            if self._end == self._first:
                self._min = position
            else:
                # A record in between was lost. Its place stays empty, so that its followers keep their numbers.
                log.warning("queue has a gap queue=%s end=%d next=%d", self._directory, self._end // 20, position // 20)
            self._tail += BLANK * (missing // ENTRY_SIZE)
            self._end = position
        return self._tail

    def _next_spill(self, tail_start: int) -> int:
        # Never past the end of a file: its time of change, by which messages are searched, is then that of its end.
        return min(tail_start + _SPILL_BYTES, self._file_end(tail_start))

    def _spill(self) -> None:
        self.write_pending()
        if self._tail is not None:
            self._tail.clear()
            self._tail_start = self._end
            self._spill_at = self._next_spill(self._end)

    def write_pending(self) -> None:
        """Write what was put since the last call. What a failing write left behind is written by the next one."""
        while self._written < self._end and self._tail is not None:
            position = self._written
            start = position - position % self._file_size
            stop = min(self._end, start + self._file_size)
            # A copy: a view that lived on in a traceback would forbid the tail to grow.
            data = self._tail[position - self._tail_start : stop - self._tail_start]
            if start >= self._created:
                self._files.create(self._path(start), self._file_size)
                self._created = start + self._file_size
            if len(data) >= _HOT_BYTES:
                self._keep_open(start)
            with self._opened(start) as descriptor:
                self._files.write_at(descriptor, data, position - start)
            self._written = stop

    def flush(self, least_pages: int = 0) -> bool:
        """Sync what is written, if that is at least `least_pages` pages; whether anything was synced.

        Takes a descriptor of its own and touches only numbers, so it may run in a worker thread. Call `write_pending`
        before it. When a sync fails, everything stays unflushed.
        """
        if not self.needs_flush(least_pages):
            return False
        written, flushed, created = self._written, self._flushed, self._created
        for start in range(flushed - flushed % self._file_size, written, self._file_size):
            try:
                descriptor = self._files.open(self._path(start))
            except FileNotFoundError:  # expired meanwhile
                continue
            try:
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
        if created > self._named:
            folder = Path(self._directory)
            for path in (
                folder,
                folder.parent,
                folder.parent.parent,
            ):  # the first file made the queue's and the topic's too
                self._files.sync_directory(path)
            self._named = created
        self._flushed = written
        return True

    def needs_flush(self, least_pages: int) -> bool:
        """Is so much written that is not known to be on disk?"""
        written, flushed = self._written, self._flushed
        return written > flushed and written // PAGE_SIZE - flushed // PAGE_SIZE >= least_pages

    @property
    def progress(self) -> tuple[int, int]:
        """How far the entries are written, and the files made; for `flushed_up_to`."""
        return self._written, self._created

    def flushed_up_to(self, progress: tuple[int, int]) -> None:
        """A sync of everything, which began when this was the `progress`, has succeeded."""
        self._flushed, self._named = progress

    def truncate(self, physical_offset: int) -> None:
        """Cut off every entry that points at or behind `physical_offset`."""
        if self.max_physical_offset <= physical_offset:
            return
        if self._writable:
            self.write_pending()
        cut = self._first_from(physical_offset) * ENTRY_SIZE
        if cut == self._first:
            self._remove_files()
            self._reset(0)
            return
        self._cut(cut)
        if self._writable and cut < self._created:
            self._zero_after(cut)
        self.max_physical_offset = self._physical_end_before(cut)

    def correct_min_offset(self, commit_log_min: int) -> None:
        """Move `min_offset` to the first entry whose record is still there, or to the end when none is."""
        if self.max_physical_offset <= commit_log_min:
            self._min = self._end  # also right with an empty queue
            return
        self._min = max(self._min, self._first)
        if self._min < self._end:
            physical_offset, size, _ = ENTRY.unpack(self._bytes(self._min, ENTRY_SIZE))
            if physical_offset < commit_log_min or (physical_offset == 0 and size == 0x7FFFFFFF):
                self._min = self._first_from(commit_log_min) * ENTRY_SIZE

    def delete_expired(self, commit_log_min: int) -> int:
        """Remove leading files whose messages are all gone, never the last one; how many were removed."""
        removed = 0
        while self._writable and self._created - self._first > self._file_size:
            last = self._last_real_before(self._first + self._file_size, self._first)
            if last is not None and last[0] >= commit_log_min:
                break
            self._forget(self._first)
            self._files.remove(self._path(self._first))
            self._first += self._file_size
            removed += 1
        self.correct_min_offset(commit_log_min)
        return removed

    def release(self) -> None:
        """Give back the descriptor, and the memory unless it holds entries that are not written yet."""
        self._forget(self._descriptor_start)
        if self._written == self._end:
            self._tail = None
            self._tail_start = self._end

    def destroy(self) -> None:
        """Remove the files and the directory."""
        self._remove_files()
        self._reset(0)
        if self._writable:
            with contextlib.suppress(OSError):  # not there, or not empty: not ours to remove
                os.rmdir(self._directory)

    def _remove_files(self) -> None:
        if self._writable:
            self._forget(self._descriptor_start)
            for start in range(self._first, self._created, self._file_size):
                self._files.remove(self._path(start))

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, queue_offset: int, max_entries: int) -> bytes:
        """The entries from `queue_offset` on, never beyond the end of their file; empty when there are none."""
        position = queue_offset * ENTRY_SIZE
        if position < self._min or position >= self._end or max_entries <= 0:
            return b""
        length = min(max_entries * ENTRY_SIZE, self._file_end(position) - position, self._end - position)
        if position < self._tail_start:
            start = position - position % self._file_size
            if start == self._last_read:
                self._keep_open(start)  # somebody reads through this file: worth a descriptor
            self._last_read = start
        return self._bytes(position, length)

    def next_file_offset(self, queue_offset: int) -> int:
        """The first queue offset of the file after the one that holds `queue_offset`."""
        return self._file_end(queue_offset * ENTRY_SIZE) // ENTRY_SIZE

    def search_by_time(self, timestamp: int, commit_log_min: int, store_time_of: Callable[[int, int], int]) -> int:
        """The queue offset whose message was stored nearest to `timestamp`, of two equally near ones the earlier.

        `store_time_of(physical_offset, size)` is negative for a record that cannot be read; the answer is then 0. The
        file is the first that was changed at `timestamp` or later: RocketMQ's rule, kept so that both answer alike.
        """
        if self._end == self._first:
            return 0
        start = self._file_by_time(timestamp)
        low = max(self._min, start) // ENTRY_SIZE
        high = min(self._end, start + self._file_size) // ENTRY_SIZE - 1
        left = right = -1
        left_time = right_time = -1
        while low <= high:
            middle = (low + high) // 2
            physical_offset, size, _ = ENTRY.unpack(self._bytes(middle * ENTRY_SIZE, ENTRY_SIZE))
            if physical_offset < commit_log_min or (physical_offset == 0 and size == 0x7FFFFFFF):
                low = middle + 1
                continue
            store_time = store_time_of(physical_offset, size)
            if store_time < 0:
                return 0
            if store_time == timestamp:
                return middle
            if store_time > timestamp:
                high, right, right_time = middle - 1, middle, store_time
            else:
                low, left, left_time = middle + 1, middle, store_time
        if left < 0:
            return right if right >= 0 else self.min_offset
        if right < 0:
            return left
        return right if timestamp - left_time > right_time - timestamp else left

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
        in_file = self._tail_start - position
        if in_file <= 0:
            assert self._tail is not None
            return bytes(self._tail[-in_file : length - in_file])
        start = position - position % self._file_size
        if start == self._descriptor_start:
            data = os.pread(self._descriptor, min(length, in_file), position - start)
        else:
            with self._opened(start) as descriptor:
                data = os.pread(descriptor, min(length, in_file), position - start)
        if in_file < length:
            assert self._tail is not None
            data += self._tail[: length - in_file]
        return data

    # -- searching by physical offset: it grows from entry to entry, except that blanks stand anywhere -----------------

    def _first_from(self, physical_offset: int) -> int:
        """The queue offset of the first real entry that points at or behind `physical_offset`, else the end."""
        low, high = self._first // ENTRY_SIZE, self._end // ENTRY_SIZE
        while low < high:
            middle = (low + high) // 2
            real = self._last_real_before((middle + 1) * ENTRY_SIZE, low * ENTRY_SIZE)
            if real is None or real[0] < physical_offset:
                low = middle + 1
            else:
                high = real[2]
        return low

    def _last_real_before(self, stop: int, low: int) -> tuple[int, int, int] | None:
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
            length = _BLOCK
        return None

    def _physical_end_before(self, end: int) -> int:
        real = self._last_real_before(end, self._first)
        return real[0] + real[1] if real else 0

    # -- files ---------------------------------------------------------------------------------------------------------

    def _path(self, start: int) -> Path:
        return Path(self._directory, f"{start:020d}")

    def _file_end(self, position: int) -> int:
        return position - position % self._file_size + self._file_size

    @contextlib.contextmanager
    def _opened(self, start: int) -> Iterator[int]:
        """A descriptor of the file that begins at `start`: the kept one, or one for this moment only."""
        if start == self._descriptor_start:
            yield self._descriptor
            return
        descriptor = self._files.open(self._path(start), writable=self._writable)
        try:
            yield descriptor
        finally:
            self._files.close(descriptor)

    def _keep_open(self, start: int) -> None:
        if start != self._descriptor_start:
            self._forget(self._descriptor_start)
            self._descriptor = self._files.open(self._path(start), writable=self._writable)
            self._descriptor_start = start

    def _forget(self, start: int) -> None:
        """Close the kept descriptor if it belongs to the file that begins at `start`."""
        if start == self._descriptor_start and self._descriptor >= 0:
            self._files.close(self._descriptor)
            self._descriptor = self._descriptor_start = -1


def count_valid(block: bytes) -> int:
    """How many entries of `block` stand before the first that is not valid (offset negative, or size not positive)."""
    sizes = block[8::20], block[9::20], block[10::20], block[11::20]
    if block[::20].isascii() and sizes[0].isascii():  # no sign bits: a look at every entry without a loop
        joined = 0
        for column in sizes:
            joined |= int.from_bytes(column, "big")
        zero = joined.to_bytes(len(sizes[0]), "big").find(b"\0")
        return len(block) // ENTRY_SIZE if zero < 0 else zero
    for number, (physical_offset, size, _) in enumerate(ENTRY.iter_unpack(block)):
        if physical_offset < 0 or size <= 0:
            return number
    return len(block) // ENTRY_SIZE


def file_starts(directory: str, file_size: int, remedy: str = _REBUILD) -> list[int]:
    """Where the files of a run begin, in order; StoreCorrupt when something is there that does not belong."""
    try:
        with os.scandir(directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    starts: list[int] = []
    for entry in entries:
        if len(entry.name) != 20 or not entry.name.isdecimal() or not entry.name.isascii() or not entry.is_file():
            raise StoreCorrupt(f"{entry.path} does not belong here: only files named by 20 digits do; move it away")
        start, size = int(entry.name), entry.stat().st_size
        if size == 0 and entry is entries[-1]:
            break  # a crash between making the file and giving it its size; it is made again when it is needed
        if size != file_size:
            raise StoreCorrupt(
                f"{entry.path} has {size} bytes, files of {file_size} are configured: restore the setting, or {remedy}"
            )
        expected = starts[-1] + file_size if starts else start - start % file_size
        if start != expected:
            raise StoreCorrupt(f"{entry.path}: the file before it should be followed by {expected:020d}; {remedy}")
        starts.append(start)
    return starts
