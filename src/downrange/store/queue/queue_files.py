"""The files of one consume queue, or of its extension: equal in size, named by the byte that they begin with."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from downrange.store.errors import StoreCorrupt
from downrange.store.files import Files, opened
from downrange.store.queue.queue_entry import ENTRY_SIZE, count_valid

FIRST_BLOCK: Final = 4_080
READ_BLOCK: Final = 65_520
REBUILD: Final = "move the whole consumequeue directory away: the broker builds it again from the commit log"


class OffsetFiles:
    """Where the files of a queue or of its extension are, and the one descriptor that it may keep.

    A base, for these two alone: as an object of its own this would be forty thousand objects more.
    """

    __slots__ = ("_descriptor", "_descriptor_start", "_directory", "_file_size", "_files", "_writable")

    def __init__(self, directory: Path | str, file_size: int, files: Files, *, writable: bool) -> None:
        self._directory = str(directory)  # a fifth of a Path, forty thousand times
        self._file_size = file_size
        self._files = files
        self._writable = writable
        self._descriptor = -1
        self._descriptor_start = -1

    def _path(self, start: int) -> str:
        return f"{self._directory}/{start:020d}"

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

    def _sync_files(self, begin: int, end: int) -> None:
        """Sync the files that hold these bytes. Takes descriptors of its own: this may run in a worker thread."""
        for start in range(begin - begin % self._file_size, end, self._file_size):
            with contextlib.suppress(FileNotFoundError), opened(self._files, self._path(start)) as descriptor:
                self._files.sync(descriptor)  # unless the file has expired meanwhile

    def _sync_names(self) -> None:
        """The first file made the directories of the queue and of its topic, too."""
        folder = Path(self._directory)
        for path in (folder, folder.parent, folder.parent.parent):
            self._files.sync_directory(path)

    def _zero_after(self, end: int) -> None:
        """Zero the bytes behind the end: old entries there would count again once the end has moved behind them."""
        start = end - end % self._file_size
        with self._opened(start) as descriptor:
            at = end - start
            while at < self._file_size:
                try:
                    at = os.lseek(descriptor, at, os.SEEK_DATA)
                except OSError:  # ENXIO: only the hole of a sparse file is left
                    break
                hole = os.lseek(descriptor, at, os.SEEK_HOLE)  # reading it would fill the page cache with zeros
                block = os.pread(descriptor, min(READ_BLOCK, hole - at), at)
                if block != bytes(len(block)):
                    self._files.write_at(descriptor, bytes(len(block)), at)
                at += len(block)


class QueueFiles(OffsetFiles):
    """The files of a consume queue: where in them its entries end."""

    __slots__ = ()

    def _find_end(self, scanned: range) -> int:
        for start in scanned:
            with self._opened(start) as descriptor:
                at, size = 0, FIRST_BLOCK
                while at < self._file_size:
                    block = os.pread(descriptor, min(size, self._file_size - at), at)
                    valid = count_valid(block)
                    at += valid * ENTRY_SIZE
                    if valid * ENTRY_SIZE < len(block) or not block:
                        return start + at
                    size = READ_BLOCK
        return scanned.stop

    def _find_end_quickly(self, scanned: range) -> int:
        for start in reversed(scanned):
            low, high = 0, self._file_size // ENTRY_SIZE
            with self._opened(start) as descriptor:
                block = os.pread(descriptor, min(FIRST_BLOCK, self._file_size), 0)
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


def first_data(descriptor: int, *, clean: bool) -> bytes:
    """The first entries of a file, whole entries only.

    If the store was closed in order (`clean`) these are the first FIRST_BLOCK bytes. After a crash they are all data of
    the file and one empty entry behind it; nothing if the data is longer than READ_BLOCK or has holes.
    """
    if clean:
        return os.pread(descriptor, FIRST_BLOCK, 0)
    end = os.lseek(descriptor, 0, os.SEEK_HOLE)
    if end > READ_BLOCK:
        return b""
    try:
        os.lseek(descriptor, end, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nothing but a hole is left
            return os.pread(descriptor, end, 0) + bytes(ENTRY_SIZE - end % ENTRY_SIZE)
        raise
    return b""


def file_starts(directory: str, file_size: int, remedy: str = REBUILD) -> list[int]:
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
