"""The captured frames, by release and scenario."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

GOLDEN = Path(__file__).parent.parent / "golden"


class Row(NamedTuple):
    """One captured frame: who sent it to whom, and its bytes."""

    place: str
    connection: int
    sender: str
    receiver: str
    code: int
    flag: int
    opaque: int
    frame: bytes
    note: str
    millis: int
    """Since the scenario began."""

    @property
    def is_response(self) -> bool:
        return bool(self.flag & 1)


@cache
def scenarios(archive_name: str = "frames.tar.xz") -> dict[str, tuple[Row, ...]]:
    """`RELEASE/SCENARIO` -> its rows in order of arrival. Replication packets (`*.ha.jsonl`) are not frames."""
    found = {}
    with tarfile.open(GOLDEN / archive_name) as archive:
        for member in archive:
            if not member.name.endswith(".jsonl") or member.name.endswith(".ha.jsonl"):
                continue
            name = member.name.removeprefix("frames/").removesuffix(".jsonl")
            file = archive.extractfile(member)
            assert file is not None
            found[name] = tuple(_rows(name, file.read().decode()))
    return found


def captured_file(archive_name: str, name: str) -> bytes:
    """A file that was kept beside the captured frames."""
    with tarfile.open(GOLDEN / archive_name) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


class HaRow(NamedTuple):
    """Bytes of one read from a replication socket."""

    connection: int
    sender: str
    data: bytes


@cache
def ha_rows(scenario: str) -> tuple[HaRow, ...]:
    """The captured replication stream of a scenario, in order of arrival."""
    return captured_ha_rows("frames.tar.xz", f"ha/{scenario}.ha.jsonl")


def captured_ha_rows(archive_name: str, name: str) -> tuple[HaRow, ...]:
    """The captured replication stream in a file of an archive."""
    rows = [json.loads(line) for line in captured_file(archive_name, name).decode().splitlines()]
    return tuple(HaRow(row["conn"], row["from"], bytes.fromhex(row["hex"])) for row in rows)


def _rows(name: str, text: str) -> Iterator[Row]:
    for line in text.splitlines():
        row = json.loads(line)
        yield Row(
            f"{name}#{row['seq']}",
            row["conn"],
            row["from"],
            row["to"],
            row["code"],
            row["flag"],
            row["opaque"],
            bytes.fromhex(row["hex"]),
            row["note"],
            row["t_ms"],
        )


def all_rows() -> Iterator[Row]:
    for rows in scenarios().values():
        yield from rows
