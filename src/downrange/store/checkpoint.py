"""Records how far each part of the store is on disk, whether the last run ended in order, and which process uses it.

Three small files in the root directory: `checkpoint`, `abort` and `lock`. Layout: docs/formats/checkpoint.md.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final

from downrange.store.errors import StoreLocked
from downrange.store.files import Files, write_synced

# Store times up to which commit log, consume queues and index are on disk; the flushed offset of the master, which is
# RocketMQ's, and the confirm offset.
_FIELDS: Final = struct.Struct(">qqqqq")
_FILE_SIZE: Final = 4096
# Recovery starts this much before the safe time, since times are taken before the bytes are written.
_SAFETY_MILLIS: Final = 3000
_FLOCK: Final = struct.Struct("hhqqi")  # struct flock of Linux: type, whence, start, length, pid


class Checkpoint:
    """Store times up to which nothing needs to be recovered. Each moves only after its files were synced."""

    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self.physic_msg_timestamp = 0
        self.logics_msg_timestamp = 0
        self.index_msg_timestamp = 0
        self.master_flushed_offset = 0
        self.confirm_phy_offset = 0
        """Under a controller: the end of the part of the log that consumers may read."""

    def load(self) -> None:
        try:
            raw = self._path.read_bytes()[: _FIELDS.size]
        except FileNotFoundError:
            return
        (
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        ) = _FIELDS.unpack(raw.ljust(_FIELDS.size, b"\0"))

    def write(self) -> None:
        """Write the times and offsets to the disk. May run in a worker thread."""
        fields = _FIELDS.pack(
            self.physic_msg_timestamp,
            self.logics_msg_timestamp,
            self.index_msg_timestamp,
            self.master_flushed_offset,
            self.confirm_phy_offset,
        )
        write_synced(self._files, self._path, _FILE_SIZE, fields)

    def go_back(self, timestamp: int, end: int) -> None:
        """Claim nothing that was stored after `timestamp` or lies behind `end`: the log was cut there."""
        self.physic_msg_timestamp = min(self.physic_msg_timestamp, timestamp)
        self.logics_msg_timestamp = min(self.logics_msg_timestamp, timestamp)
        self.index_msg_timestamp = min(self.index_msg_timestamp, timestamp)
        self.confirm_phy_offset = min(self.confirm_phy_offset, end)
        self.write()

    def safe_timestamp(self, *, with_index: bool) -> int:
        """The time up to which all records are on disk with their queue entries, and `with_index` in the index."""
        safe = min(self.physic_msg_timestamp, self.logics_msg_timestamp)
        if with_index:
            safe = min(safe, self.index_msg_timestamp)
        return max(safe - _SAFETY_MILLIS, 0)


class AbortMarker:
    """The file `abort`, which exists while a store is open: if it exists at the start, the last run crashed.

    Java leaves it empty. We write the boot id of the machine into it: if the id is still the same, only the process
    died, and all that it had written to memory maps is intact.
    """

    def __init__(self, path: Path, files: Files, boot_id: str | None = None) -> None:
        self._path = path
        self._files = files
        self._boot_id = _current_boot_id() if boot_id is None else boot_id

    @property
    def is_set(self) -> bool:
        return self._path.exists()

    @property
    def is_of_this_boot(self) -> bool:
        try:
            return bool(self._boot_id) and self._path.read_text("ascii", "replace") == self._boot_id
        except FileNotFoundError:
            return False

    def set(self) -> None:
        write_synced(self._files, self._path, len(self._boot_id), self._boot_id.encode("ascii"))
        self._files.sync_directory(self._path.parent)

    def clear(self) -> None:
        self._files.remove(self._path)
        self._files.sync_directory(self._path.parent)


def _current_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class DirectoryLock:
    """The file `lock`, whose byte 0 is locked, as in Java, by the only process that has the directory open.

    The kernel releases the lock when the process ends in any way. It also releases the lock when this process closes
    another descriptor of the file: so no other part of the process may open it.
    """

    # A record lock does not exclude the process that has it.
    _held: Final[set[tuple[int, Path]]] = set()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def take(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        key = self._key()
        if key in self._held:
            raise StoreLocked(f"{self._path.parent} is already open in this process ({os.getpid()})")
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
        except OSError:
            owner = _owner_of_lock(descriptor)
            os.close(descriptor)
            who = f"process {owner}" if owner else "another process"
            raise StoreLocked(f"{self._path.parent} is in use by {who}") from None
        os.pwrite(descriptor, b"lock", 0)
        self._descriptor = descriptor
        self._held.add(key)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._held.discard(self._key())

    def owner(self) -> int | None:
        """The id of the process that has the directory open; 0 if the id is unknown, None if there is no process."""
        if self._key() in self._held:  # opening and closing the file here would release the lock
            return os.getpid()
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _owner_of_lock(descriptor)
        finally:
            os.close(descriptor)

    def _key(self) -> tuple[int, Path]:
        return os.getpid(), self._path.resolve()


def _owner_of_lock(descriptor: int) -> int | None:
    """The id of the process that has the lock; 0 if the kernel does not tell it, None if the lock is free."""
    question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    try:
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question)[: _FLOCK.size])
    except OSError:
        return None
    return max(0, pid) if kind != fcntl.F_UNLCK else None
