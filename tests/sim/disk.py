"""The disks of simulated machines: real files on a file system in memory, and beside them what of each is safe.

A sync makes the pages of a file safe, a sync of a directory the names in it. After a power cut every other page or
name is there or not, as chance will have it, and sectors may be torn. Of a small table that is replaced by renaming a
synced file, the newest version whose name was synced is there.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from downrange.model.record import CorruptRecord, unpack_record

PAGE: Final = 4096
SECTOR: Final = 512
TORN: Final = 64
WRITTEN_IN_PLACE: Final = "timercheck"
"""The one file of the directory `config` that is no table: it is written in place, and not replaced."""
TEMPORARY: Final = ".tmp"
"""A new version of a table is written under such a name."""


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def is_table(path: Path) -> bool:
    """Whether a file is a small table, of which every version is a file of its own."""
    return path.parent.name == "config" and path.name != WRITTEN_IN_PLACE


class Disk:
    """One machine's disk. `root` changes with every crash: what is left of the files is copied."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory = directory
        self._chance = chance
        self._number = 0
        self._safe_bytes: dict[int, bytearray] = {}
        self._safe_names: set[str] = set()
        self._synced_names: dict[str, list[str]] = {}
        """The names in each directory at its last sync."""
        self._safe_tables: dict[str, bytes] = {}
        self._replaced: dict[str, bytes | None] = {}
        """The tables that are not what they were at the last sync of their directory. None: read the file."""
        self.fails_to_sync = False
        self.is_full = False
        self.was_faulty = False
        """Whether a fault was injected since the last start: then a broker may end by itself."""
        self.root.mkdir(parents=True)

    @property
    def root(self) -> Path:
        return self._directory / str(self._number)

    # --- what the store does ------------------------------------------------------------------------------------

    def may_sync(self) -> None:
        """Raises OSError while the disk cannot write."""
        if self.fails_to_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def synced(self, descriptor: int) -> None:
        self.may_sync()
        status = os.fstat(descriptor)
        size = status.st_size
        safe = self._safe_bytes.get(status.st_ino)
        if safe is None or len(safe) != size:
            safe = self._safe_bytes[status.st_ino] = bytearray(size)
        os.preadv(descriptor, (safe,), 0)

    def names_synced(self, path: str) -> None:
        self.may_sync()
        if path.endswith("/config"):
            self._sync_tables(path)
            names = [WRITTEN_IN_PLACE] if os.path.exists(f"{path}/{WRITTEN_IN_PLACE}") else []
        else:
            names = os.listdir(path)
        if self._synced_names.get(path) != names:
            self._synced_names[path] = names
            self._safe_names.update([f"{path}/{name}" for name in names])
            self._safe_names.add(path)

    def _sync_tables(self, path: str) -> None:
        for name, content in self._replaced.items():
            try:
                self._safe_tables[name] = _read(f"{path}/{name}") if content is None else content
            except FileNotFoundError:
                self._safe_tables.pop(name, None)
        self._replaced.clear()

    def replaced(self, source: str, target: str) -> None:
        """A file has a new name. Tables come and go in no other way."""
        old, new = os.path.basename(source), os.path.basename(target)
        is_written = old.endswith(TEMPORARY)
        self._replaced[new] = None if is_written else self._replaced.get(old, self._safe_tables.get(old))
        self._replaced[old] = None

    def all_synced(self) -> None:
        for path in sorted(self.root.rglob("*")):
            self._safe_names.add(str(path))
            if path.is_file():
                self._safe_bytes[path.stat().st_ino] = bytearray(path.read_bytes())
                if is_table(path):
                    self._safe_tables[path.name] = path.read_bytes()

    def needs_room(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # --- what happens to it -------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Only the process died: all it wrote is there."""
        source = self.root
        self._number += 1
        shutil.copytree(source, self.root)
        self._forget()

    def lose_power(self) -> None:
        """Keep what is safe, and of the rest what chance leaves."""
        source = self.root
        self._number += 1
        self.root.mkdir()
        for path in sorted(source.rglob("*")):
            if path.is_dir():
                continue
            is_named = all(str(one) in self._safe_names for one in (path, *path.parents) if source in one.parents)
            if is_table(path) and path.name not in self._safe_tables:
                continue
            if not is_named and not is_table(path) and self._chance.random() < 0.5:
                continue
            copy = self.root / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(self._safe_tables[path.name] if is_table(path) else self._mix(path))
        abort = self.root / "abort"
        if abort.exists():
            abort.write_bytes(b"another boot")
        self._forget()

    def _mix(self, path: Path) -> bytes:
        now = path.read_bytes()
        safe = bytes(self._safe_bytes.get(path.stat().st_ino, b"")).ljust(len(now), b"\0")[: len(now)]
        if safe == now:
            return now
        likely = self._chance.choice((0.0, 0.3, 0.7, 1.0))
        unit = self._chance.choice((TORN, SECTOR, PAGE))
        return b"".join(
            (now if self._chance.random() < likely else safe)[at : at + unit] for at in range(0, len(now), unit)
        )

    def flip_a_bit(self) -> str:
        """Change one bit of a message's body, or of a file that is derived from the log; the name of the file."""
        places = [*self._bodies(), *self._derived()]
        if not places:
            return ""
        path, at = self._chance.choice(places)
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << self._chance.randrange(8)
        path.write_bytes(data)
        return str(path.relative_to(self.root))

    def _bodies(self) -> Iterator[tuple[Path, int]]:
        """A place in the body of each message."""
        for path in sorted(self.root.glob("commitlog/*")):
            data, at = path.read_bytes(), 0
            try:
                while at < len(data):
                    head, body_at, *_, end = unpack_record(data, at, len(data))
                    if head[-1]:
                        yield path, body_at + self._chance.randrange(head[-1])
                    at = end
            except CorruptRecord:  # the end of the file
                continue

    def _derived(self) -> Iterator[tuple[Path, int]]:
        for path in sorted(self.root.rglob("*")):
            if path.is_file() and path.relative_to(self.root).parts[0] in ("consumequeue", "index", "checkpoint"):
                used = len(path.read_bytes().rstrip(b"\0"))
                if used:
                    yield path, self._chance.randrange(used)

    def wipe(self) -> None:
        """An operator removes everything."""
        self._number += 1
        self.root.mkdir()
        self._forget()

    def _forget(self) -> None:
        """All that is left now has been on the disk for long."""
        self._safe_bytes.clear()
        self._safe_names.clear()
        self._synced_names.clear()
        self._safe_tables.clear()
        self._replaced.clear()
        self.all_synced()
        self.fails_to_sync = self.is_full = self.was_faulty = False
