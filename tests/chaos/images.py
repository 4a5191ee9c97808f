"""A disk whose state can be copied at any moment, as a power cut would leave it: an ext4 image on XFS.

XFS copies a file at one moment (a reflink), so the copy of an image under a mounted file system is what the device held
then: all that was written to the device, nothing that was still in the page cache. It stands for a disk without a cache
of its own that a power cut would empty.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

OUTER_MIB: Final = 1024
INNER_MIB: Final = 192


def missing() -> str:
    """What this machine lacks for it; empty if nothing."""
    if os.geteuid() != 0:
        return "mounts need the rights of root"
    tools = [tool for tool in ("mkfs.xfs", "mkfs.ext4", "mount") if shutil.which(tool) is None]
    return f"{' and '.join(tools)} not found: install xfsprogs and e2fsprogs" if tools else ""


class ImageDisk:
    """Holds always: `path` is the mounted ext4, `_image` the file behind it."""

    def __init__(self, directory: Path) -> None:
        self._outer = directory / "outer"
        self._image = self._outer / "image"
        self.path = directory / "disk"
        self._cut = directory / "cut"
        for made in (self._outer, self.path, self._cut):
            made.mkdir()
        self._make(directory / "outer.xfs", OUTER_MIB, "mkfs.xfs", "-q", "-m", "reflink=1")
        _run("mount", "-o", "loop", str(directory / "outer.xfs"), str(self._outer))
        self._make(self._image, INNER_MIB, "mkfs.ext4", "-q", "-F")
        _run("mount", "-o", "loop", str(self._image), str(self.path))

    @staticmethod
    def _make(path: Path, mebibytes: int, *command: str) -> None:
        with path.open("wb") as file:
            file.truncate(mebibytes << 20)
        _run(*command, str(path))

    def copy(self) -> None:
        """Cut the power of a copy, now."""
        _run("cp", "--reflink=always", str(self._image), str(self._outer / "copy"))

    @contextmanager
    def mounted_copy(self) -> Iterator[Path]:
        """What the next start would find; the copy is gone afterwards."""
        _run("mount", "-o", "loop", str(self._outer / "copy"), str(self._cut))
        try:
            yield self._cut
        finally:
            _run("umount", str(self._cut))
            (self._outer / "copy").unlink()

    def close(self) -> None:
        for path in (self._cut, self.path, self._outer):
            subprocess.run(["umount", str(path)], check=False, capture_output=True)


@contextmanager
def image_disk(directory: Path) -> Iterator[ImageDisk]:
    made = ImageDisk(directory)
    try:
        yield made
    finally:
        made.close()


def _run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}: {ended.stderr.strip()}"
