"""The interface to the operating system: the store writes, syncs and removes files only through a `Files`.

`OsFiles` is the real one. A test passes its own to make the n-th write or fsync fail, or to record the order of writes.
Reads use memory maps and `pread` directly: the store does not promise to survive a read that fails.

`mmap.flush` holds the GIL while it waits for the disk (stalls of a second were measured); `os.fdatasync` does not, and
it writes mapped pages, too. So a file is always synced by its descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

_ZEROS: Final = bytes(1 << 20)


class Files(Protocol):
    """File operations. Some take a path as text: there may be forty thousand queues, and making a Path takes time."""

    def create(self, path: Path | str, size: int) -> None: ...

    def open(self, path: Path | str, *, writable: bool = True) -> int: ...

    def close(self, descriptor: int) -> None: ...

    def map(self, descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap: ...

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None: ...

    def reserve(self, descriptor: int, position: int, length: int) -> None: ...

    def clear_from(self, path: Path, position: int) -> None: ...

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...

    def sync_file_system(self, path: Path) -> None: ...

    def remove(self, path: Path | str) -> None: ...

    def replace(self, source: Path, target: Path) -> None: ...


@contextlib.contextmanager
def opened(files: Files, path: Path | str, *, writable: bool = True) -> Iterator[int]:
    """A descriptor of a file, which is closed at the end of the block."""
    descriptor = files.open(path, writable=writable)
    try:
        yield descriptor
    finally:
        files.close(descriptor)


def write_synced(files: Files, path: Path, size: int, data: bytes) -> None:
    """Write the beginning of a small file, which is made with `size` bytes if it is missing, and sync it."""
    files.create(path, size)
    with opened(files, path) as descriptor:
        files.write_at(descriptor, data, 0)
        files.sync(descriptor)


def replace_synced(files: Files, path: Path, data: bytes) -> None:
    """Replace a small file by one with other contents: whenever the machine stops, one of the two is there, whole."""
    written = path.with_name(f"{path.name}.tmp")
    files.remove(written)
    write_synced(files, written, 0, data)
    files.replace(written, path)
    files.sync_directory(path.parent)


class OsFiles:
    """File operations of the operating system."""

    def create(self, path: Path | str, size: int) -> None:
        """Create a sparse file of `size` zeros, with its parent directories; an existing file is kept."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            descriptor = os.open(path, flags, 0o644)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def open(self, path: Path | str, *, writable: bool = True) -> int:
        return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def map(self, descriptor: int, size: int, *, writable: bool = True) -> mmap.mmap:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(descriptor, size, access=access)

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        """Write all of `data`; a short write is continued, a full disk raises."""
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, position)
            view = view[written:]
            position += written

    def reserve(self, descriptor: int, position: int, length: int) -> None:
        """Reserve disk blocks for this range, or raise an error if the disk is full. A write to a mapped page without a
        block on a full disk would kill the process (SIGBUS)."""
        os.posix_fallocate(descriptor, position, length)

    def clear_from(self, path: Path, position: int) -> None:
        """Fill the file with zeros from `position` to its end, front first. The size never changes, not even briefly:
        if the process died in between, no start would accept the file. Holes of a sparse file stay holes."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            while position < size:
                try:
                    position = os.lseek(descriptor, position, os.SEEK_DATA)
                except OSError as error:
                    if error.errno == errno.ENXIO:  # the rest of the file is a hole
                        break
                    raise
                length = min(len(_ZEROS), os.lseek(descriptor, position, os.SEEK_HOLE) - position, size - position)
                if os.pread(descriptor, length, position) != _ZEROS[:length]:
                    self.write_at(descriptor, _ZEROS[:length], position)
                position += length
        finally:
            os.close(descriptor)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Sync the names of the files in a directory."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_file_system(self, path: Path) -> None:
        """Sync all files and names of the file system of `path`: one call for thousands of files."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Python does not offer syncfs. Called through ctypes it releases the GIL.
            if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(path))
        finally:
            os.close(descriptor)

    def remove(self, path: Path | str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)


OS_FILES = OsFiles()
