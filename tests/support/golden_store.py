"""Store directories written by the genuine broker, unpacked, and the records of their commit logs."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from downrange.model.message import StoredMessage
from downrange.model.record import MAGIC_BLANK, decode_record

STORES = Path(__file__).parent.parent / "golden" / "store"


@dataclass(frozen=True)
class GoldenStore:
    """One archive: its directory, and what the genuine broker answers when started on it."""

    root: Path
    manifest: dict[str, Any]

    def setting(self, key: str) -> int:
        return int(self.manifest["config"][key])

    def records(self) -> Iterator[StoredMessage]:
        """Every record of the commit log, in order."""
        for path in sorted((self.root / "commitlog").iterdir()):
            data = path.read_bytes()
            at = 0
            while at < len(data) - 8 and data[at : at + 4] != b"\0\0\0\0":
                if int.from_bytes(data[at + 4 : at + 8], "big") == MAGIC_BLANK:
                    break
                message = decode_record(data, at)
                yield message
                at += message.store_size

    def files_under(self, *names: str) -> dict[str, bytes]:
        return files_under(self.root.joinpath(*names))


def unpack(name: str, directory: Path) -> GoldenStore:
    """Unpack `name` into `directory`, with the times of its files: searching by time depends on them."""
    with tarfile.open(STORES / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return GoldenStore(directory / "store", json.loads((STORES / f"{name}.manifest.json").read_text("utf-8")))


def files_under(root: Path) -> dict[str, bytes]:
    """Relative path -> bytes of every file below `root`."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
