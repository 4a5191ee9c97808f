"""The ordered run of segments that make up a commit log."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.store.errors import DiskFull, FlushFailed, StoreCorrupt, StoreError
from downrange.store.files import Files
from downrange.store.log.headroom import AHEAD, Stretch
from downrange.store.log.segment import NAME_DIGITS, Segment, segment_name

log = logging.getLogger(__name__)

PAGE: Final = 4096  # of all flush arithmetic, whatever the machine's page is
FULL_PATH_RATIO: Final = 0.85  # a path above it gets no new files as long as another is below


def disk_use(path: Path) -> float:
    """The used share of the disk as RocketMQ computes it, in whole hundredths; -1 when the path is missing."""
    try:
        status = os.statvfs(path)
    except OSError:
        return -1.0
    used = status.f_blocks - status.f_bfree
    reachable = used + status.f_bavail
    return -(-100 * used // reachable) / 100 if reachable else -1.0


class BufferPool:
    """The transient pool: a fixed number of buffers, each as large as a file, made when first needed."""

    def __init__(self, count: int, size: int, *, required: bool = False) -> None:
        self._size = size
        # Without a buffer a new file is written directly, unless one is required.
        self.required = required
        self._idle: list[mmap.mmap] = []
        self.available = count

    def borrow(self) -> mmap.mmap | None:
        if not self.available:
            return None
        self.available -= 1
        return self._idle.pop() if self._idle else mmap.mmap(-1, self._size)

    def give_back(self, buffer: mmap.mmap) -> None:
        self._idle.append(buffer)
        self.available += 1


@dataclass(frozen=True, slots=True)
class LogPaths:
    """The directories of a commit log. New files go to those that are not read-only and not too full, in turn."""

    _paths: Sequence[Path]
    _read_only_paths: Sequence[Path] = ()
    _disk_use: Callable[[Path], float] = disk_use

    def files(self) -> list[Path]:
        """All files in these directories, in the order of their names."""
        listed = dict.fromkeys((*self._paths, *self._read_only_paths))
        entries = [entry for path in listed if path.is_dir() for entry in path.iterdir() if not entry.is_dir()]
        return sorted(entries, key=lambda entry: entry.name)

    def path_of_new(self, number: int) -> Path:
        """The directory for the file of the log with this number, which does not exist yet."""
        candidates = [path for path in self._paths if path not in self._read_only_paths]
        if not candidates:
            raise StoreError("every directory of storePathCommitLog is read-only")
        if len(candidates) > 1:
            candidates = [path for path in candidates if self._disk_use(path) <= FULL_PATH_RATIO] or candidates
        candidates.sort()
        return candidates[number % len(candidates)]


class Segments:
    """Files of equal size, ordered by start; the last one takes the appends.

    Holds always: `min_offset <= flushed_offset <= max_offset <= wrote_offset`. A file may be missing in the middle
    (somebody deleted it): reads there find nothing, and `load` says so. `check` tests what holds always.
    """

    def __init__(
        self, paths: LogPaths, file_size: int, files: Files, *, writable: bool, pool: BufferPool | None = None
    ) -> None:
        self.file_size = file_size
        self.flushed_offset = PhysicalOffset(0)
        self.failure: FlushFailed | None = None
        self.writable = writable
        self._paths = paths
        self._files = files
        self._pool = pool
        self._segments: list[Segment] = []
        self._by_number: dict[int, Segment] = {}
        self._made: Segment | None = None
        self._retired: list[Segment] = []

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(tuple(self._segments))

    def check(self) -> None:
        """Raise AssertionError unless everything holds that holds always."""
        order = [self.min_offset, self.flushed_offset, self.max_offset, self.wrote_offset]
        assert order == sorted(order), f"the least, flushed, largest and written offsets are in order: {order}"
        assert sorted(self._by_number.items()) == [(one.start // self.file_size, one) for one in self._segments]
        for one in self._segments:
            within = [0, one.flushed, one.readable, one.wrote, one.size]
            assert within == sorted(within), f"the offsets within a file are in order: {one}"
            assert one.is_full or one is self.last, f"appends go to the last file only: {one}"
            assert one.memory is None or one.wrote <= one.limit <= one.size, f"a file ends behind its records: {one}"

    def load(self) -> list[str]:
        """Find the files; return warnings. A file of another size, or one that is none of ours, stops the start."""
        warnings: list[str] = []
        found: dict[int, Path] = {}
        entries = self._paths.files()
        for entry in entries:
            name = entry.name
            if len(name) != NAME_DIGITS or not name.isascii() or not name.isdigit():
                raise StoreCorrupt(f"{entry} does not belong into a commit log: move it away")
            size = entry.stat().st_size
            if size == 0 and entry == max(entries, key=lambda entry: entry.name):
                # A crash between creating a file and giving it its size leaves this behind.
                warnings.append(f"{entry} is empty and was left out")
                if self.writable:
                    self._files.remove(entry)
                continue
            if size != self.file_size:
                raise StoreCorrupt(
                    f"{entry} has {size} bytes, but mappedFileSizeCommitLog={self.file_size}: "
                    "start with the file size this store was written with"
                )
            start = int(name)
            if start % self.file_size:
                raise StoreCorrupt(f"{entry}: its name is not a multiple of mappedFileSizeCommitLog={self.file_size}")
            if start in found:
                raise StoreCorrupt(f"{entry} and {found[start]} are the same part of the log")
            found[start] = entry
        self.adopt(found)
        for before, after in zip(self._segments, self._segments[1:], strict=False):
            if after.start != before.start + self.file_size:
                warnings.append(
                    f"commit-log files from {segment_name(before.start + self.file_size)} to before "
                    f"{segment_name(after.start)} are missing: their messages cannot be read"
                )
        return warnings

    def adopt(self, found: Mapping[int, Path]) -> None:
        """Make these files the log, by the offsets they begin at; each has `file_size` bytes and counts as full."""
        self._segments = [
            Segment(path, self.file_size, self._files, writable=self.writable) for _, path in sorted(found.items())
        ]
        self._by_number = {segment.start // self.file_size: segment for segment in self._segments}
        self.flushed_offset = self.max_offset

    @property
    def is_pooled(self) -> bool:
        """Whether appends go to the transient pool, and can be read only after a commit."""
        return self._pool is not None

    @property
    def first(self) -> Segment | None:
        return self._segments[0] if self._segments else None

    @property
    def last(self) -> Segment | None:
        return self._segments[-1] if self._segments else None

    @property
    def min_offset(self) -> PhysicalOffset:
        return self._segments[0].start if self._segments else PhysicalOffset(-1)

    @property
    def max_offset(self) -> PhysicalOffset:
        """End of what can be read."""
        if not self._segments:
            return PhysicalOffset(0)
        if self._pool is not None:
            # Several files may wait for their commit; the log ends with the first of them.
            for segment in self._segments:
                if segment.readable < segment.size:
                    return PhysicalOffset(segment.start + segment.readable)
        last = self._segments[-1]
        return PhysicalOffset(last.start + last.readable)

    @property
    def wrote_offset(self) -> PhysicalOffset:
        """End of what was appended."""
        if not self._segments:
            return PhysicalOffset(0)
        last = self._segments[-1]
        return PhysicalOffset(last.start + last.wrote)

    def find(self, offset: PhysicalOffset) -> Segment | None:
        return self._by_number.get(offset // self.file_size)

    def following(self, segment: Segment) -> Segment | None:
        """The next file that exists."""
        direct = self._by_number.get(segment.start // self.file_size + 1)
        if direct is not None or segment is self._segments[-1]:
            return direct
        return next((later for later in self._segments if later.start > segment.start), None)

    def roll(self, start: PhysicalOffset) -> Segment:
        """A new last file that begins at `start`."""
        if self._pool is not None and self._pool.required and not self._pool.available:
            raise StoreError("the transient pool has no free buffer and fastFailIfNoBufferInStorePool is on")
        prepared, self._made = self._prepared, None
        if prepared is not None and prepared.start == start:
            segment = prepared
        else:
            if prepared is not None:
                self._files.remove(prepared.path)
            segment = self._create(start)
        segment.open_for_append(self._pool.borrow() if self._pool is not None else None)
        self._segments.append(segment)
        self._by_number[start // self.file_size] = segment
        log.info("segment rolled file=%s", segment.path)
        return segment

    def prepare(self, *, warm: bool = False) -> None:
        """Create the file after the last one ahead of its need. May run beside appends, in a worker thread."""
        last = self.last
        if last is None or self._prepared is not None:
            return
        for rolled in self:
            if rolled.is_locked and rolled is not last:
                rolled.unlock()
        segment = self._create(PhysicalOffset(last.start + self.file_size))
        if warm:
            segment.warm()
        self._made = segment

    @property
    def _prepared(self) -> Segment | None:
        """The file after the last one, if it was made ahead. For the store's thread, which alone knows what is in use.

        Appends that rolled on while it was being made have taken the file for themselves, and it must be left alone.
        """
        made, last = self._made, self.last
        return made if made is not None and last is not None and made.start > last.start else None

    def next_stretch(self) -> Stretch | None:
        """What a worker should prepare ahead of the appends; None when enough is ready, or soon will be."""
        last, following = self.last, self._prepared
        if last is None:
            return None
        stretch = last.next_stretch()
        if stretch is None and following is not None and last.wrote + AHEAD > last.size:
            stretch = following.next_stretch()
        return stretch

    def prepare_stretch(self, stretch: Stretch) -> None:
        """Get a part of the log ready ahead of its need. May run beside appends, in a worker thread."""
        try:
            stretch.prepare()
        except OSError as error:
            raise storage_error("no room for more of the commit log", error) from error

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None or not self._segments

    def discard_prepared(self) -> None:
        """Remove a file that was made ahead and not used: the orderly end of a run."""
        prepared, self._made = self._prepared, None
        if prepared is not None:
            self._files.remove(prepared.path)

    def _create(self, start: PhysicalOffset) -> Segment:
        path = self._paths.path_of_new(start // self.file_size) / segment_name(start)
        try:
            self._files.create(path, self.file_size)
            # Before there is a next one: a power cut must not take a file out of the middle of the log.
            self._files.sync_directory(path.parent)
        except OSError as error:
            raise storage_error(f"cannot create {path}", error) from error
        segment = Segment(path, self.file_size, self._files)
        segment.set_end(0)
        return segment

    def cut(self, offset: PhysicalOffset) -> None:
        """Make `offset` the end: the file it lies in ends there, later ones are taken out of the list (not removed)."""
        for segment in list(self._segments):
            if segment.start > offset:
                self._forget(segment)
            elif segment.start + segment.size > offset:
                segment.set_end(offset - segment.start)
            else:
                segment.set_end(segment.size)
        self.flushed_offset = min(self.flushed_offset, self.wrote_offset)

    def take_oldest(self) -> Path | None:
        """Take the first file out of the log, unless it is the only one. Reads of the file that have begun may finish.

        The file itself stays for the caller to remove: that takes a while and may be done in a worker thread.
        """
        if len(self._segments) < 2:
            return None
        segment = self._segments[0]
        self._forget(segment)
        self.flushed_offset = max(self.flushed_offset, self.min_offset)
        return segment.path

    def _forget(self, segment: Segment) -> None:
        self._segments.remove(segment)
        del self._by_number[segment.start // self.file_size]
        segment.release()
        self._retired.append(segment)

    @property
    def dirty_pages(self) -> int:
        return self.max_offset // PAGE - self.flushed_offset // PAGE

    @property
    def pages_to_commit(self) -> int:
        return self.wrote_offset // PAGE - self.max_offset // PAGE

    def commit(self) -> None:
        """Carry the transient pool to the files. In one thread at a time, the same one as `flush`."""
        for segment in tuple(self._segments):
            if segment.buffer is not None:
                try:
                    buffer = segment.commit()
                except OSError as error:
                    raise storage_error(f"cannot write {segment.path}", error) from error
                if buffer is not None and self._pool is not None:
                    self._pool.give_back(buffer)

    def flush(self) -> PhysicalOffset:
        """Sync everything readable at the time of the call; return the offset up to which the log is safe.

        In one thread at a time, beside appends and reads. After the disk refused once this never succeeds again: the
        kernel may have dropped the pages it could not write, and a second sync would say yes to nothing.
        """
        while self._retired:
            self._retired.pop().close_descriptor()
        if self.failure is not None:
            raise self.failure
        target = self.max_offset
        for segment in tuple(self._segments):
            if segment.start + segment.size <= self.flushed_offset:
                continue
            if segment.start >= target:
                break
            try:
                segment.flush()
            except OSError as error:
                if segment in self._retired:  # deleted meanwhile: nothing is left to be made safe
                    continue
                self.failure = FlushFailed(
                    f"cannot sync {segment.path}: {error.strerror or error}; the store takes no more messages"
                )
                raise self.failure from error
            self.flushed_offset = max(self.flushed_offset, PhysicalOffset(segment.start + segment.flushed))
        return self.flushed_offset

    def release_idle(self) -> int:
        """Drop mappings that were not used since the last call; return how many."""
        released = 0
        for segment in self._segments[:-1]:
            if segment.touched:
                segment.touched = False
            elif segment.buffer is None:
                segment.release()
                released += 1
        return released

    def close(self) -> None:
        for segment in (*self._segments, *self._retired):
            segment.close_descriptor()
            segment.release()
        self._retired.clear()


def storage_error(what: str, error: OSError) -> StoreError:
    """The error of the store for one of the file system; it names the file or directory that cannot be used."""
    reason = error.strerror or str(error)
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "there is a file where a directory is needed"
    place = f"{error.filename}: " if error.filename and str(error.filename) not in what else ""
    text = f"{what}: {place}{reason}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(text)
    return StoreError(text)
