"""The files `epochFileCheckpoint` and `epochFileCheckpoint.bak`: the epochs of a log, as RocketMQ 5 writes them.

Text lines: the number of entries, the CRC-32 of all that follows (31 bits; 0: not checked), then `epoch-start` for each
entry. And the file `epochSeen`, which RocketMQ does not have: the newest epoch that this broker was told of.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final
from zlib import crc32

from downrange.model.record import CRC_MASK
from downrange.store.epochs import Epoch, EpochList
from downrange.store.errors import StoreCorrupt, StoreError
from downrange.store.files import OS_FILES, Files, replace_synced

log = logging.getLogger(__name__)

EPOCH_FILE: Final = "epochFileCheckpoint"
SEEN_FILE: Final = "epochSeen"


def encode_epochs(epochs: EpochList) -> bytes:
    text = "".join(f"{epoch}-{start}\n" for epoch, start in epochs.entries).encode("ascii")
    return b"%d\n%d\n" % (len(epochs.entries), crc32(text) & CRC_MASK) + text


def decode_epochs(data: bytes) -> EpochList:
    """The epochs in the text of a file. Raises StoreError."""
    try:
        lines = data.decode("ascii").splitlines(keepends=True)
        count, checksum = int(lines[0]), int(lines[1])
        entries = [line.rstrip("\r\n").split("-") for line in lines[2:]]
        epochs = [Epoch(int(epoch), int(start)) for epoch, start in entries]
    except (ValueError, IndexError):
        raise StoreCorrupt("it is not a list of epochs") from None
    if len(epochs) != count:
        raise StoreCorrupt(f"it has {len(epochs)} epochs instead of {count}")
    if checksum and crc32("".join(lines[2:]).encode("ascii")) & CRC_MASK != checksum:
        raise StoreCorrupt("its checksum is wrong")
    return EpochList(epochs)


class EpochFile:
    """The epochs of a store's log, on disk before a change returns. For the store's own thread.

    Holds always: of the file and its backup at least one is whole, whenever the machine stops.
    """

    def __init__(self, directory: Path, files: Files = OS_FILES) -> None:
        self._path = directory / EPOCH_FILE
        self._backup = directory / f"{EPOCH_FILE}.bak"
        self._seen_path = directory / SEEN_FILE
        self._files = files
        self.epochs = EpochList()
        self.seen = -1
        """The newest epoch that this broker was told of, by whomever."""

    def __repr__(self) -> str:
        return f"<EpochFile {self._path} {self.epochs} seen={self.seen}>"

    def load(self, log_end: int) -> None:
        """Read the files; entries behind the end of the log are left out. Raises StoreCorrupt if both are damaged."""
        self.epochs = self._read().within(log_end)
        newest = self.epochs.last.epoch if self.epochs.last is not None else -1
        try:
            self.seen = max(newest, int(self._seen_path.read_text("ascii")))
        except FileNotFoundError:
            self.seen = newest
        except ValueError:
            raise StoreCorrupt(f"{self._seen_path}: it is not a number; restore it or delete it") from None

    def _read(self) -> EpochList:
        try:
            return decode_epochs(self._path.read_bytes())
        except FileNotFoundError:
            if not self._backup.exists():
                return EpochList()
            found = "it is missing"
        except StoreError as error:
            found = str(error)
        log.warning("epoch file damaged, reading its backup file=%s reason=%s", self._path, found)
        try:
            return decode_epochs(self._backup.read_bytes())
        except (FileNotFoundError, StoreError) as error:
            raise StoreCorrupt(
                f"{self._path}: {found}, and so is its backup ({error}); this replica needs an empty directory"
            ) from None

    def change(self, epochs: EpochList) -> None:
        """Make `epochs` those of the log; they are on disk when this returns. Raises OSError."""
        if epochs == self.epochs:
            return
        if self._path.exists():
            replace_synced(self._files, self._backup, self._path.read_bytes())
        replace_synced(self._files, self._path, encode_epochs(epochs))
        self.epochs = epochs

    def see(self, epoch: int) -> None:
        """Note on disk that an epoch has begun; older ones change nothing. Raises OSError."""
        if epoch > self.seen:
            replace_synced(self._files, self._seen_path, b"%d\n" % epoch)
            self.seen = epoch
