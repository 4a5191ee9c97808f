"""The consume queue: 20-byte entries that say where the messages of one topic queue lie in the commit log.

Entry n stands at logical byte 20·n of a run of equal files; see docs/formats/consume-queue.md. Everything here can be
rebuilt from the commit log, so a doubtful tail is cut, never repaired.

A broker may have 40,000 of these, most of them idle. So there is no mapping: new entries gather in `QueueTails` until
`write_pending` writes them in one go, an idle queue is a handful of numbers, and only a busy one keeps a descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset, QueueOffset, TopicQueue
from downrange.store.errors import StoreClosed, StoreCorrupt, StoreError
from downrange.store.files import Files
from downrange.store.queue.queue_entries import NO_COPY, QueueEntries
from downrange.store.queue.queue_entry import BLANK, ENTRY, ENTRY_SIZE, count_valid
from downrange.store.queue.queue_files import REBUILD, file_starts, first_data
from downrange.store.queue.queue_states import Resting
from downrange.store.queue.queue_tails import AT, BLOCK, END, PHYSICAL_END, PUT_DONE, PUT_STATE, SPILL_AT, QueueTails

__all__ = ["BLANK", "ENTRY", "ENTRY_SIZE", "PAGE_SIZE", "ConsumeQueue", "count_valid", "file_starts"]

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 4096  # the unit of "least pages", whatever the machine's own is

_HOT_BYTES: Final = 1_000  # as much to write at once makes it worth keeping the descriptor


class ConsumeQueue(QueueEntries):
    """The entries of one topic queue, in order.

    Always: `min_offset <= max_offset`; what was written lies in files without gaps; entries after the end are zero on
    disk, so that what was cut off cannot come back. `check` tests it. One thread puts, reads and cuts; `flush` may run
    beside it in another one, but not beside `load`, `recover`, `truncate` or `destroy`.
    """

    __slots__ = ("_flushed", "_min_physical", "_named", "_written", "queue_id", "topic")

    def __init__(
        self,
        directory: Path | str,
        name: TopicQueue,
        file_size: int,
        files: Files,
        *,
        writable: bool = True,
        tails: QueueTails | None = None,
    ) -> None:
        if file_size <= 0 or file_size % ENTRY_SIZE:
            raise StoreError(f"a consume queue file has a multiple of {ENTRY_SIZE} bytes, not {file_size}")
        super().__init__(directory, file_size, files, tails or QueueTails(), writable=writable)
        self.topic, self.queue_id = name
        self._reset(0)

    def _reset(self, start: int) -> None:
        """No files and no entries, the next file beginning at logical byte `start`."""
        self._first = self._created = start
        self._written = self._flushed = self._min = start
        self._named = start  # the files before have their names safely in the directory
        self._last_read = -1
        self._min_physical = -1  # where the entry at _min points, if that is known: it saves looking into the file
        self._end_at(start)
        self._tails.rows[self.row + PHYSICAL_END] = 0

    def _end_at(self, end: int) -> None:
        """Make `end` the end, with nothing in memory."""
        self._copy = NO_COPY
        self._tails.rows[self.row + END] = end
        self._tails.free(self.row)
        self._tails.rows[self.row + SPILL_AT] = 0

    def leave(self) -> None:
        """Take this queue out of the store. A caller that still holds it works on a copy of its numbers."""
        self._tails.remove_row(self.row)
        self._tails = QueueTails()
        self.row = self._tails.add_row()
        self._reset(0)

    def __repr__(self) -> str:
        pending = (self._end - self._written) // ENTRY_SIZE
        return f"<ConsumeQueue {self.topic}/{self.queue_id} {self.min_offset}..{self.max_offset}, {pending} pending>"

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always; entries that are in memory are compared."""
        start, end = self._tail, self._end
        assert self._min <= end, f"the first entry is not behind the end: {self}"
        order = [self._first, self._flushed, self._written, self._created]
        assert order == sorted(order), f"what was written lies in files: {self} {order}"
        assert start <= self._written <= end, f"each entry is in a file or in memory: {self}"
        assert (self._tails.rows[self.row + AT] > 0) == (start < end), f"memory is taken for entries only: {self}"
        assert self.max_physical_offset == self._physical_end_before(end), f"the last entry says where it ends: {self}"
        for position in range(start, self._written, ENTRY_SIZE):
            with self._opened(position - position % self._file_size) as descriptor:
                written = os.pread(descriptor, ENTRY_SIZE, position % self._file_size)
            assert written == self._tails.read(self.row, position, position + ENTRY_SIZE), f"written as put: {self}"

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
        return self._descriptor >= 0 or self._tails.rows[self.row + SPILL_AT] > 0

    @property
    def may_sleep(self) -> bool:
        """Whether all there is to know of this queue is safely in its one file, and nobody has used it for a while."""
        return not self.is_open and self.has_one_file and self._flushed == self._end > self._first

    @property
    def has_one_file(self) -> bool:
        return self._created - self._first == self._file_size

    # -- opening -------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """See which files there are. They count as full until `recover` has looked into them."""
        self.release()
        starts = file_starts(self._directory, self._file_size)
        self._reset(starts[0] if starts else 0)
        if starts:
            end = starts[-1] + self._file_size
            self._created = self._written = self._flushed = self._named = end
            self._end_at(end)

    @property
    def resting(self) -> Resting:
        """The numbers that `resume` needs to bring this queue back; only while it `may_sleep`."""
        return Resting(self.max_physical_offset, self._end, self._min, self._min_physical)

    def resume(self, resting: Resting) -> None:
        """Take over the numbers that `resting` gave earlier, instead of `load` and `recover`, which read the file."""
        last = resting.end - 1
        self._first = last - last % self._file_size
        self._created = self._named = self._first + self._file_size
        self._written = self._flushed = resting.end
        self._min, self._min_physical = resting.min, resting.min_physical
        self._end_at(resting.end)
        self._tails.rows[self.row + PHYSICAL_END] = resting.physical_end

    def recover(self, *, clean: bool = False) -> None:
        """Find the end: the first entry that is not valid, looking from the third-last file on.

        After a clean stop every file is full of valid entries up to the end, so a binary search finds the same place.
        """
        if self._created == self._first:
            return
        last = self._created - self._file_size
        self._keep_open(last)  # all that follows mostly looks into this one
        try:
            if not self._recover_small(clean=clean):
                self._recover(clean=clean)
        finally:
            self._forget(last)

    def _recover(self, *, clean: bool) -> None:
        scanned = range(max(self._first, self._created - 3 * self._file_size), self._created, self._file_size)
        end = self._find_end_quickly(scanned) if clean else self._find_end(scanned)
        self._cut(end)
        if not clean:
            # A killed process may have left pages that were never synced: let the next flush see to them.
            self._flushed = self._named = min(scanned.start, end)
            if self._writable and end < self._created:
                self._zero_after(end)
        self._tails.rows[self.row + PHYSICAL_END] = self._physical_end_before(end)

    def _recover_small(self, *, clean: bool) -> bool:
        """One look is enough for a queue that has one file and few entries, as most do, and only zeros behind them."""
        if self._created - self._first > self._file_size:
            return False
        with self._opened(self._first) as descriptor:
            block = first_data(descriptor, clean=clean)
        end = count_valid(block) * ENTRY_SIZE
        if not 0 < end < len(block) or BLANK in (block[:ENTRY_SIZE], block[end - ENTRY_SIZE : end]):
            return False
        if not clean:
            if block[end:] != bytes(len(block) - end):
                return False
            self._flushed = self._named = self._first  # as in `_recover`
        self._cut(self._first + end)
        self._min_physical = ENTRY.unpack_from(block)[0]
        physical_offset, size, _ = ENTRY.unpack_from(block, end - ENTRY_SIZE)
        self._tails.rows[self.row + PHYSICAL_END] = physical_offset + size
        return True

    def _cut(self, end: int) -> None:
        """Make `end` the end of the queue and remove the files behind it. Everything before `end` must be written."""
        self._last_read = -1
        if self._writable:
            keep = max(end, self._first + 1)  # an empty first file stays: it says where the numbering is
            while self._created - self._file_size >= keep:
                start = self._created - self._file_size
                self._forget(start)
                self._files.remove(self._path(start))
                self._created = start
            self._named = min(self._named, self._created)
        self._written = end
        self._end_at(end)
        self._flushed = min(self._flushed, end)
        self._min = min(self._min, end)
        self._min_physical = -1

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, queue_offset: QueueOffset, physical_offset: PhysicalOffset, size: int, tags_code: int) -> None:
        """Append the entry of one record; a record that was put before is silently passed over."""
        tails, numbers = self._tails, self.row * 8 + 8
        position = queue_offset * 20
        physical_end = physical_offset + size
        end, last_physical_end, at, count, total, spill_at = PUT_STATE.unpack_from(tails.rows, numbers)
        if position != end or physical_end <= last_physical_end or not spill_at:
            if not self.prepare(position, physical_end):
                return
            _, _, at, count, total, spill_at = PUT_STATE.unpack_from(tails.rows, numbers)
        if not at % BLOCK:
            at = tails.take_block(at)
        ENTRY.pack_into(tails.memory, at, physical_offset, size, tags_code)
        PUT_DONE.pack_into(tails.rows, numbers, position + 20, physical_end, at + 20, count + 1, total + size)
        if position + 20 >= spill_at:
            self.spill()

    def prepare(self, position: int, physical_end: int) -> bool:
        """Let an entry be put at `position`; False when that entry is a duplicate."""
        rows, row = self._tails.rows, self.row
        end = rows[row + END]
        if not self._writable:
            raise StoreClosed(f"{self._directory} is open for reading only")
        if position < end or physical_end <= rows[row + PHYSICAL_END]:
            return False
        if position - end >= self._file_size and self._created == self._first == end:
            self._reset(position - position % self._file_size)
            end = rows[row + END]
        missing = position - end
        if missing >= self._file_size:
            raise StoreCorrupt(
                f"{self._directory} ends at queue offset {self.max_offset}, but the next message of the commit log is"
                f" number {position // ENTRY_SIZE}: files of this queue are missing; {REBUILD}"
            )
        if not rows[row + SPILL_AT]:
            self.get_ready()
        if missing:
            if end == self._first:
                self._min = position
                self._min_physical = -1
            else:
                # A record in between was lost. Its place stays empty, so that its followers keep their numbers.
                log.warning("queue has a gap queue=%s end=%d next=%d", self._directory, end // 20, position // 20)
            self._tails.extend(row, BLANK * (missing // ENTRY_SIZE))
        return True

    def get_ready(self) -> None:
        """Let the next entry be put without `prepare`."""
        self._tails.rows[self.row + SPILL_AT] = self._next_spill(self._end)

    def _next_spill(self, tail_start: int) -> int:
        # Never far past the end of a file: its time of change, by which messages are searched, is that of its end.
        return min(tail_start + self._tails.room, self._file_end(tail_start))

    def spill(self) -> None:
        """As much is in memory as should be: write it."""
        self.write_pending()
        self._copy = NO_COPY
        self._tails.free(self.row)
        self.get_ready()

    def write_pending(self) -> None:
        """Write what was put since the last call. What a failing write left behind is written by the next one."""
        end = self._end
        while self._written < end:
            position = self._written
            start = position - position % self._file_size
            stop = min(end, start + self._file_size)
            data = self._tails.read(self.row, position, stop)
            if start >= self._created:
                self._files.create(self._path(start), self._file_size)
                self._created = start + self._file_size
            if len(data) >= _HOT_BYTES and self._may_keep_open:
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
        self._sync_files(flushed, written)
        if created > self._named:
            self._sync_names()
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

    def truncate(self, physical_offset: PhysicalOffset) -> None:
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
        self._tails.rows[self.row + PHYSICAL_END] = self._physical_end_before(cut)

    def correct_min_offset(self, commit_log_min: PhysicalOffset) -> None:
        """Move `min_offset` to the first entry whose record is still there, or to the end when none is."""
        if self.max_physical_offset <= commit_log_min:
            self._min = self._end  # also right with an empty queue
            self._min_physical = -1
            return
        if self._min < self._first:
            self._min = self._first
            self._min_physical = -1
        if self._min < self._end and not 0 <= commit_log_min <= self._min_physical:
            physical_offset, size, _ = ENTRY.unpack(self._bytes(self._min, ENTRY_SIZE))
            if physical_offset < commit_log_min or (physical_offset == 0 and size == 0x7FFFFFFF):
                self._min = self._first_from(commit_log_min) * ENTRY_SIZE
                self._min_physical = -1
            else:
                self._min_physical = physical_offset

    def delete_expired(self, commit_log_min: PhysicalOffset) -> int:
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
        """Give back the descriptor, and the memory unless it holds entries that are not written yet.

        A queue that had entries in memory stays ready for more until the next call: `get_ready` is slower than `put`.
        """
        self._forget(self._descriptor_start)
        if self._written == self._end:
            was_used = self._tails.rows[self.row + AT] > 0
            self._end_at(self._written)
            if was_used:
                self.get_ready()

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
