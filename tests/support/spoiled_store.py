"""Whatever can be wrong with the files of a store, at random."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

_NAMES = ("x", "0" * 20, "00000000000000000020", "9" * 20, "1" * 17, "7")


def spoil(random: Random, root: Path) -> str:
    """Damage one file or directory; tells what was done to which."""
    found = sorted(root.rglob("*"))
    wanted = [path for path in found if path.is_dir() == (random.random() < 0.2)] or found
    if not wanted:
        return "nothing is left"
    path = random.choice(wanted)
    what = random.choice(_OF_DIRECTORIES if path.is_dir() else _OF_FILES)
    what(random, path)
    return f"{what.__name__} {path.relative_to(root)}"


def change_bytes(random: Random, path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as stream:
        for _ in range(random.choice((1, 5, 50))):
            stream.seek(random.randrange(max(1, size)))
            stream.write(random.randbytes(random.choice((1, 4, 8))))
    os.truncate(path, size)


def fill_with_chance(random: Random, path: Path) -> None:
    path.write_bytes(random.randbytes(path.stat().st_size))


def cut(random: Random, path: Path) -> None:
    os.truncate(path, random.choice((0, random.randrange(path.stat().st_size + 1))))


def lengthen(random: Random, path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size + random.choice((1, 20, size)))


def remove(random: Random, path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def rename(random: Random, path: Path) -> None:
    target = path.with_name(random.choice(_NAMES))
    if not target.is_dir():
        path.rename(target)


def become_the_other(random: Random, path: Path) -> None:
    """A directory becomes a file, and the reverse."""
    is_file = path.is_file()
    remove(random, path)
    path.mkdir() if is_file else path.write_bytes(random.randbytes(50))


def get_a_stranger(random: Random, path: Path) -> None:
    stranger = path / random.choice(_NAMES)
    if not stranger.is_dir():
        stranger.write_bytes(random.randbytes(random.choice((0, 5, 4096))))


_OF_DIRECTORIES = (remove, become_the_other, get_a_stranger, get_a_stranger)
_OF_FILES = (change_bytes, change_bytes, fill_with_chance, cut, cut, lengthen, remove, rename, become_the_other)
