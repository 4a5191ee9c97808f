"""Files that stop working before their n-th change, as when the process is killed there."""

from __future__ import annotations

from pathlib import Path

from downrange.store.files import OsFiles


class Died(BaseException):
    """The process is gone; nothing may be tidied up."""


class DyingFiles(OsFiles):
    """Dies before its n-th operation that changes something."""

    def __init__(self, last: int) -> None:
        self.left = last

    def _count(self) -> None:
        if not self.left:
            raise Died
        self.left -= 1

    def create(self, path: Path | str, size: int) -> None:
        self._count()
        super().create(path, size)

    def write_at(self, descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
        self._count()
        super().write_at(descriptor, data[: len(data) // 2], position)
        self._count()
        super().write_at(descriptor, data, position)

    def sync(self, descriptor: int) -> None:
        self._count()
        super().sync(descriptor)

    def remove(self, path: Path | str) -> None:
        self._count()
        super().remove(path)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)
