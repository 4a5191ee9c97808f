"""The manifest: a numbered entry for every commit; together the entries say which files count.

    _manifest/00000000000000000012.json           one entry
    _manifest/snapshot-00000000000000000012.json  all entries up to 12, whose own files may be gone

An entry appears as a whole, by renaming. Entries are written under a lock of the directory, so that numbers have no
gaps and no two writers take the same. Readers need no lock.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from downrange.spark.lake import files
from downrange.spark.lake.layout import MANIFEST, LakeError
from downrange.spark.offsets import Tree

_ENTRY: Final = re.compile(r"(\d{20})\.json")
_SNAPSHOT: Final = re.compile(r"snapshot-(\d{20})\.json")
_READ_ATTEMPTS: Final = 20
T = TypeVar("T")


class QueueRange(NamedTuple):
    """Messages of one queue; `end` is the offset after the last one."""

    broker: str
    queue_id: int
    start: int
    end: int


class LakeFile(msgspec.Struct, frozen=True):
    """One Parquet file: its paths, relative to the lake, and its content."""

    path: str
    temporary: str
    topic: str
    date: str
    rows: int
    bytes: int
    crc32: int
    min_store_millis: int
    max_store_millis: int
    ranges: tuple[QueueRange, ...]


class Entry(msgspec.Struct, frozen=True):
    """One commit: files that count from now on, and files that no longer do."""

    kind: Literal["batch", "compaction"]
    add: tuple[LakeFile, ...]
    remove: tuple[str, ...] = ()
    query: str = ""
    batch: int = -1
    position: Tree | None = None
    """The start of the next batch of the query: the next offset per topic, broker and queue."""
    time_millis: int = 0


class Contents(msgspec.Struct):
    """The lake after all entries up to `version`.

    Holds always: a message is in at most one of `files`. `next_offsets` has per topic, broker and queue the offset
    behind all messages that ever were in the lake; `batches` and `positions` have the last batch of each query and the
    start of its next one.
    """

    version: int = 0
    files: dict[str, LakeFile] = {}
    next_offsets: Tree = {}
    batches: dict[str, int] = {}
    positions: dict[str, Tree] = {}

    def has_batch(self, query: str, batch: int) -> bool:
        return self.batches.get(query, -1) >= batch

    def check(self, entry: Entry) -> None:
        """Raise LakeError when `entry` would make a message count twice or lose one."""
        if missing := [path for path in entry.remove if path not in self.files]:
            raise LakeError(f"{missing[0]} is no longer part of the lake: another process has replaced it")
        leaving = set(entry.remove)
        if taken := [file.path for file in entry.add if file.path in self.files and file.path not in leaving]:
            raise LakeError(f"{taken[0]} is in the lake already")
        if entry.kind == "compaction":
            return
        for file in entry.add:
            for part in file.ranges:
                known = self.next_offset(file.topic, part.broker, part.queue_id)
                if part.start < known:
                    raise LakeError(
                        f"queue {part.queue_id} of {file.topic} on {part.broker}: offset {part.start} is in the lake "
                        f"already, which is at {known}; was the broker's store created again, or the checkpoint lost?"
                    )

    def next_offset(self, topic: str, broker: str, queue_id: int) -> int:
        return self.next_offsets.get(topic, {}).get(broker, {}).get(str(queue_id), 0)

    def apply(self, version: int, entry: Entry) -> None:
        assert version == self.version + 1
        self.version = version
        for path in entry.remove:
            del self.files[path]
        for file in entry.add:
            self.files[file.path] = file
            for part in file.ranges:
                queues = self.next_offsets.setdefault(file.topic, {}).setdefault(part.broker, {})
                queues[str(part.queue_id)] = max(part.end, queues.get(str(part.queue_id), 0))
        if entry.query:
            self.batches[entry.query] = max(entry.batch, self.batches.get(entry.query, -1))
        if entry.position is not None:
            self.positions[entry.query] = entry.position


class Manifest:
    """The entries of one lake. Any number of processes may read and commit."""

    def __init__(self, lake: Path) -> None:
        self._directory = lake / MANIFEST

    def create(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    @property
    def is_there(self) -> bool:
        return self._directory.is_dir()

    def read(self) -> Contents:
        return self._read()[0]

    def recent(self) -> tuple[Contents, list[Entry]]:
        """The result of all entries, and the entries after the last snapshot."""
        return self._read()

    def commit(self, build: Callable[[Contents], Entry | None]) -> Entry | None:
        """Append the entry that `build` makes for the present contents; None when it makes none."""
        with self._locked():
            contents = self.read()
            entry = build(contents)
            if entry is None:
                return None
            contents.check(entry)
            files.write_whole(self._directory / f"{contents.version + 1:020}.json", msgspec.json.encode(entry))
            return entry

    def snapshot(self) -> None:
        """Join all entries into one snapshot and delete them. Their commits must be finished: see `Lake.settle`."""
        with self._locked():
            contents = self.read()
            files.write_whole(self._directory / f"snapshot-{contents.version:020}.json", msgspec.json.encode(contents))
            for path in self._directory.iterdir():
                number = _ENTRY.fullmatch(path.name) or _SNAPSHOT.fullmatch(path.name)
                is_old = number is not None and int(number[1]) <= contents.version
                if is_old and path.name != f"snapshot-{contents.version:020}.json":
                    files.remove(path)

    def _read(self) -> tuple[Contents, list[Entry]]:
        for _ in range(_READ_ATTEMPTS):
            try:
                return self._read_once()
            except FileNotFoundError:
                continue  # a snapshot was written between our reading of the directory and of a file
        raise LakeError(f"{self._directory} changes faster than it can be read")

    def _read_once(self) -> tuple[Contents, list[Entry]]:
        names = os.listdir(self._directory)
        snapshot = max((found[0] for name in names if (found := _SNAPSHOT.fullmatch(name))), default=None)
        contents = Contents() if snapshot is None else self._decode(snapshot, Contents)
        versions = sorted(int(found[1]) for name in names if (found := _ENTRY.fullmatch(name)))
        recent = []
        for version in versions:
            if version <= contents.version:
                continue
            if version != contents.version + 1:
                raise FileNotFoundError(f"entry {contents.version + 1}")
            entry = self._decode(f"{version:020}.json", Entry)
            contents.apply(version, entry)
            recent.append(entry)
        return contents, recent

    def _decode(self, name: str, kind: type[T]) -> T:
        path = self._directory / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.DecodeError as error:
            raise LakeError(f"{path} is damaged: {error}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._directory / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
