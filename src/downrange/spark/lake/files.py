"""The steps that change the files of a lake. After a crash each step was done completely or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from downrange.spark.lake.layout import LakeBusy


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that, even after a crash, has all of its content or does not exist."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Sync a directory: a new file name survives a power cut only after this."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Let only one process at a time into the block; others get LakeBusy."""
    with path.open("ab") as file:  # the lock ends with the block or with the process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LakeBusy(f"{what} is running already on this lake") from None
        yield
