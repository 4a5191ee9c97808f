"""One fixed-size file of the commit log, mapped into memory.

A segment is named after the offset of its first byte, in 20 digits, and has its full size from the start: what is not
written yet reads as zeros. With the transient pool an append goes to a buffer first and `commit` carries it to the
file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.store.config import BLANK_SIZE
from downrange.store.errors import StoreCorrupt
from downrange.store.files import Files, opened
from downrange.store.log import memory_lock
from downrange.store.log.headroom import AHEAD, PIECE, STEP, Headroom, Stretch

NAME_DIGITS: Final = 20
_ZEROS: Final = bytes(1 << 20)


def segment_name(start: int) -> str:
    return f"{start:0{NAME_DIGITS}d}"


class Segment:
    """One file. Positions count from its start; `flushed <= readable <= wrote <= size` holds always.

    The store's thread appends and reads. `commit` and `flush` may run beside it, in one thread at a time: they read
    `wrote` once and move only `committed` and `flushed`, and only after the kernel said yes. The descriptor belongs to
    them alone, so nobody can close it under a running sync.

    A mapping is dropped, never closed: slices that readers still hold keep it alive until they are gone.
    """

    __slots__ = (
        "_data_end",
        "_descriptor",
        "_files",
        "_headroom",
        "_mapping",
        "_view",
        "_writable",
        "buffer",
        "committed",
        "flushed",
        "is_locked",
        "limit",
        "memory",
        "path",
        "size",
        "start",
        "touched",
        "wrote",
    )

    def __init__(self, path: Path, size: int, files: Files, *, writable: bool = True, piece: int = PIECE) -> None:
        self.path = path
        self.start = PhysicalOffset(int(path.name))
        self.size = size
        # Full until recovery says otherwise.
        self.wrote = self.committed = self.flushed = size
        self._data_end = size
        # Where appends write to, and up to which position they may without asking `make_room`.
        self.memory: mmap.mmap | None = None
        self.limit = 0
        self.buffer: mmap.mmap | None = None
        self.touched = False
        self.is_locked = False
        self._files = files
        self._headroom = Headroom(path, size, files, piece=piece)
        self._writable = writable
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._descriptor: int | None = None

    def __repr__(self) -> str:
        return f"<Segment {self.path} wrote={self.wrote} flushed={self.flushed} of {self.size}>"

    @property
    def readable(self) -> int:
        """Up to where readers may read."""
        return self.wrote if self.buffer is None else self.committed

    @property
    def is_full(self) -> bool:
        return self.wrote == self.size

    @property
    def view(self) -> memoryview:
        """The whole file, mapped on first use."""
        self.touched = True
        view = self._view
        return self._map() if view is None else view

    @property
    def mapping(self) -> mmap.mmap:
        """The whole file as an `mmap`, whose slices are copies; mapped on first use."""
        self.view  # noqa: B018  (maps the file)
        assert self._mapping is not None
        return self._mapping

    def _map(self) -> memoryview:
        with opened(self._files, self.path, writable=self._writable) as descriptor:
            # A file shorter than its mapping would kill the process at the first touch of what is missing.
            actual = os.fstat(descriptor).st_size
            if actual < self.size:
                raise StoreCorrupt(f"{self.path} has {actual} bytes, {self.size} are expected")
            self._mapping = self._files.map(descriptor, self.size, writable=self._writable)
        self._view = memoryview(self._mapping)
        return self._view

    def set_end(self, position: int) -> None:
        """Everything before `position` is data and safe; used by recovery and for new files."""
        self.wrote = self.committed = self.flushed = position
        self._data_end = self.size
        self.limit = 0
        self._headroom.begin_at(position)

    def open_for_append(self, buffer: mmap.mmap | None = None) -> None:
        """Get ready for appends at `wrote`; with a buffer they go there first."""
        mapping = self.mapping
        self.buffer = buffer
        self.memory = mapping if buffer is None else buffer
        self.limit = self.wrote if buffer is None else self.size - BLANK_SIZE
        if buffer is not None:
            self._headroom.begin_at(self.size)  # `commit` writes the file, and not through the mapping

    def make_room(self, size: int) -> bool:
        """Raise `limit` so that `size` more bytes fit; False when the file has no room for them and a blank record.

        What comes after an append is always ready, too, as far as a blank record goes.
        """
        end = self.wrote + size
        fits = end <= self.size - BLANK_SIZE
        self._claim(end if fits else self.wrote)
        return fits

    def _claim(self, end: int) -> None:
        """Get the file ready up to `end` and a blank record, unless it is, and raise `limit` to `end` or some more."""
        if self.buffer is None:
            self._headroom.extend(end + BLANK_SIZE)
            self.limit = max(self.limit, min(self._headroom.end, end + STEP) - BLANK_SIZE)

    def next_stretch(self) -> Stretch | None:
        """What a worker should prepare for the next appends; None when enough is ready for them, or soon will be."""
        if self._headroom.end >= min(self.wrote + AHEAD - STEP, self.size):
            return None
        return self._headroom.next_stretch(self.wrote + AHEAD)

    def append_raw(self, data: memoryview) -> None:
        """Copy bytes that came from another log, at `wrote`; they must fit."""
        end = self.wrote + len(data)
        assert end <= self.size
        if self.memory is None:
            self.open_for_append()
        if end > self.limit:
            self._claim(end)
        assert self.memory is not None
        self.memory[self.wrote : end] = data
        self.wrote = end

    def fill(self, blank: bytes) -> None:
        """Write the blank record that ends this file, as far as there is room for one, and call the file full."""
        if self.size - self.wrote >= len(blank):
            assert self.memory is not None
            self.memory[self.wrote : self.wrote + len(blank)] = blank
            self._data_end = self.wrote + len(blank)
        self.memory = None
        self.limit = 0
        self.wrote = self.size

    def commit(self) -> mmap.mmap | None:
        """Carry what is in the buffer to the file; return the buffer once the file is full and needs it no more."""
        buffer = self.buffer
        if buffer is None:
            return None
        target = self.wrote
        end = min(target, self._data_end)
        if end > self.committed:
            with memoryview(buffer) as whole, whole[self.committed : end] as part:
                self._files.write_at(self._own_descriptor(), part, self.committed)
        self.committed = target
        if target < self.size:
            return None
        self.buffer = None
        return buffer

    def flush(self) -> None:
        """Sync what is readable to the disk. Raises OSError and leaves `flushed` alone when the disk says no."""
        target = self.readable
        if target <= self.flushed:
            return
        self._files.sync(self._own_descriptor())
        self.flushed = target
        if target == self.size:
            self.close_descriptor()

    def _own_descriptor(self) -> int:
        if self._descriptor is None:
            self._descriptor = self._files.open(self.path)
            # The first sync of a new file also has to make its name safe.
            self._files.sync_directory(self.path.parent)
        return self._descriptor

    def close_descriptor(self) -> None:
        """Only for the thread that flushes."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._files.close(descriptor)

    def release(self) -> None:
        """Drop the mapping; the next read maps again."""
        self._view = None
        self._mapping = None
        self.memory = None
        self.limit = 0

    def warm(self) -> None:
        """Claim all blocks of a new file, bring its pages into memory and keep them there until `unlock`.

        Writes nothing, so it may run beside appends that could not wait for it; releases the GIL.
        """
        with opened(self._files, self.path) as descriptor:
            self._files.reserve(descriptor, 0, self.size)
            chunk = bytearray(len(_ZEROS))
            for position in range(0, self.size, len(chunk)):
                os.preadv(descriptor, [chunk], position)
        self.is_locked = memory_lock.lock(self.mapping)

    def unlock(self) -> None:
        """Let the pages go: this file takes no more appends."""
        if self.is_locked and self._mapping is not None:
            memory_lock.unlock(self._mapping)
        self.is_locked = False

    def has_data_from(self, position: int) -> bool:
        """Is any byte that is not zero at or after `position`? Holes of a sparse file are skipped unread."""
        return next(self.chunks_with_data(position), None) is not None

    def chunks_with_data(self, position: int) -> Iterator[tuple[int, int]]:
        """Ranges at or after `position` that hold something else than zeros."""
        view = self.view
        with opened(self._files, self.path, writable=False) as descriptor:
            while position < self.size:
                try:
                    start = os.lseek(descriptor, position, os.SEEK_DATA)
                    end = os.lseek(descriptor, start, os.SEEK_HOLE)
                except OSError:  # ENXIO: nothing but a hole is left
                    return
                for at in range(start, end, len(_ZEROS)):
                    upto = min(at + len(_ZEROS), end, self.size)
                    if view[at:upto] != _ZEROS[: upto - at]:
                        yield at, upto
                position = end

    def modified_millis(self) -> int:
        return os.stat(self.path).st_mtime_ns // 1_000_000
