"""A store directory as it lies on disk: written by Downrange or by RocketMQ, in use or not.

The sizes of files are not written down in a store. Here they are read off the files themselves.
Nothing is ever changed, created or locked.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Final

from downrange.model.message import PhysicalOffset
from downrange.settings import Property, configure, read_properties
from downrange.store.checkpoint import AbortMarker, Checkpoint, DirectoryLock
from downrange.store.config import StoreConfig
from downrange.store.errors import StoreError
from downrange.store.files import OS_FILES
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.segment import NAME_DIGITS, Segment
from downrange.store.log.segments import LogPaths, Segments
from downrange.store.log.walk import WalkedRecord
from downrange.store.recovery import find_record

_FOREIGN: Final = {
    "rocksdb": "queues in RocksDB (storeType=defaultRocksDB)",
    "consumequeue_r": "queues in RocksDB (storeType=defaultRocksDB)",
    "batchconsumequeue": "queues of the 5.x type BatchCQ",
}


class NotAStore(StoreError):
    """This directory holds no store, or one that cannot be read."""


class StoreState(Enum):
    """What the crash mark and the lock say about a directory."""

    STOPPED = "stopped in order"
    CRASHED = "not stopped in order"
    LIVE = "in use"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where, what, and what to do about it. `count` says how often it was found there."""

    where: str
    what: str
    remedy: str
    count: int = 1

    def __str__(self) -> str:
        more = f" ({self.count - 1} more like it)" if self.count > 1 else ""
        return f"{self.where}: {self.what}{more}: {self.remedy}"


class Problems:
    """Collects problems. Those of one kind at one place become one line: a damaged file would fill a terminal."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Problem] = {}

    def add(self, where: str, kind: str, what: str, remedy: str) -> None:
        first = self._found.get((where, kind))
        if first is None:
            self._found[where, kind] = Problem(where, what, remedy)
        else:
            self._found[where, kind] = Problem(first.where, first.what, first.remedy, first.count + 1)

    def all(self) -> tuple[Problem, ...]:
        return tuple(self._found.values())


@dataclass(frozen=True, slots=True)
class FileRun:
    """Files that belong together, by the offset each begins at; all of them have `size` bytes."""

    size: int
    files: dict[int, Path]


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The directory of one consume queue."""

    topic: str
    queue_id: int
    path: Path
    sizes: dict[str, int] = field(hash=False)
    """Every file and its size, in the order of names."""

    @property
    def file_size(self) -> int | None:
        """The size of the files; None when there is no file that is not empty."""
        return _most_common(iter(self.sizes.values()))


class StoreDirectory:
    """One store, found and measured: its state, its log, and where its queues and index files are.

    Building it lists the files of log and index, and reads no message; queues are listed when they are first asked for.
    What does not belong goes into `problems`.
    """

    def __init__(
        self,
        root: Path,
        *,
        properties: Mapping[str, Property] | None = None,
    ) -> None:
        if not root.is_dir():
            raise NotAStore(f"{root} is not a directory")
        self.root = root
        self.problems = Problems()
        self.notes: list[str] = []
        persisted = root / "config" / "broker.properties"
        if properties is None and persisted.is_file():
            properties = read_properties(persisted)
        self.has_config = properties is not None
        self.config = configure(StoreConfig, {**(properties or {}), "storePathRootDir": Property(str(root))})
        for name, what in _FOREIGN.items():
            if (root / name).is_dir() and any((root / name).iterdir()):
                raise NotAStore(f"{root / name}: this store keeps {what}, which cannot be read here")
        log_paths = (*self.config.commit_log_paths, *self.config.read_only_commit_log_paths)
        if not any(path.is_dir() for path in log_paths):
            meant = root / "store"  # the data directory of a standalone has its store inside
            hint = f"; did you mean {meant}?" if (meant / "commitlog").is_dir() else ""
            raise NotAStore(f"{root} is not a store: it has no directory commitlog{hint}")
        self.owner = DirectoryLock(root / "lock").owner()
        self.abort = AbortMarker(root / "abort", OS_FILES)
        if self.owner is not None:
            self.state = StoreState.LIVE
        else:
            self.state = StoreState.CRASHED if self.abort.is_set else StoreState.STOPPED
        self.checkpoint = Checkpoint(root / "checkpoint", OS_FILES)
        self.checkpoint.load()

        self.commit_log_files = self._commit_log_files(dict.fromkeys(log_paths))
        segments = Segments(
            LogPaths(self.config.commit_log_paths), self.commit_log_files.size or 1, OS_FILES, writable=False
        )
        segments.adopt(self.commit_log_files.files)
        self.segments = segments
        self.commit_log = CommitLog(segments)
        self.index_files = self._index_files()

    @property
    def is_live(self) -> bool:
        return self.state is StoreState.LIVE

    @cached_property
    def queues(self) -> list[QueuePlace]:
        return list(self._queue_places("consumequeue"))

    @cached_property
    def queue_file_size(self) -> int | None:
        return _most_common(size for queue in self.queues for size in queue.sizes.values())

    @cached_property
    def ext_queues(self) -> dict[tuple[str, int], QueuePlace]:
        return {(place.topic, place.queue_id): place for place in self._queue_places("consumequeue_ext")}

    @cached_property
    def ext_file_size(self) -> int | None:
        return _most_common(size for queue in self.ext_queues.values() for size in queue.sizes.values())

    def name_of(self, path: Path) -> str:
        """The path as it is shown: within the store where that is possible."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def _commit_log_files(self, paths: Mapping[Path, None]) -> FileRun:
        found: dict[int, Path] = {}
        sizes: dict[Path, int] = {}
        for path in paths:
            for entry in sorted(path.iterdir()) if path.is_dir() else ():
                if len(entry.name) != NAME_DIGITS or not entry.name.isascii() or not entry.name.isdigit():
                    if not entry.is_dir():
                        self._foreign_file(entry)
                elif (size := _size_of(entry)) is not None:
                    sizes[entry] = size
        file_size = _most_common(iter(sizes.values())) or 0
        newest = max(sizes, key=lambda path: path.name, default=None)
        for path, size in sizes.items():
            name, start = self.name_of(path), int(path.name)
            if size == 0 and path is newest:
                if self.state is StoreState.STOPPED:
                    self.problems.add(name, "size", "is empty", "the next start removes it")
            elif size != file_size:
                what = f"has {size} bytes, the other files of the log have {file_size}"
                self.problems.add(name, "size", what, "restore this file from a copy; its messages were not checked")
            elif start % file_size:
                what = f"its name is not a multiple of the file size {file_size}"
                self.problems.add(name, "name", what, "give it the offset of its first byte as name, or move it away")
            elif start in found:
                what = f"is the same part of the log as {self.name_of(found[start])}"
                self.problems.add(name, "twice", what, "keep one of the two and move the other away")
            else:
                found[start] = path
        self._check_configured("mappedFileSizeCommitLog", self.config.mapped_file_size_commit_log, file_size)
        return FileRun(file_size, dict(sorted(found.items())))

    def _check_configured(self, key: str, configured: int, actual: int) -> None:
        if self.has_config and actual and configured != actual:
            what = f"the files have {actual} bytes, the configuration says {key}={configured}"
            self.problems.add(key, "size", what, "start the broker with the size this store was written with")

    def _foreign_file(self, path: Path) -> None:
        self.problems.add(
            self.name_of(path), "foreign", "does not belong here", "move it away: no broker starts with it"
        )

    def _queue_places(self, kind: str) -> Iterator[QueuePlace]:
        top = self.root / kind
        for topic in sorted(top.iterdir()) if top.is_dir() else ():
            for name in _numbered_directories(topic) if topic.is_dir() else ():
                path = topic / name
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    yield QueuePlace(topic.name, int(name), path, _sizes_in(path))

    def queue(self, topic: str, queue_id: int) -> QueuePlace:
        """One queue as it is now, without a look at the others. It has no files when it does not exist."""
        path = self.root / "consumequeue" / topic / str(queue_id)
        return QueuePlace(topic, queue_id, path, _sizes_in(path) if path.is_dir() else {})

    def _index_files(self) -> list[Path]:
        top = self.root / "index"
        found = []
        for path in sorted(top.iterdir()) if top.is_dir() else ():
            if len(path.name) != 17 or not (path.name.isascii() and path.name.isdecimal()) or not path.is_file():
                self._foreign_file(path)
            else:
                found.append(path)
        return found

    # The log.

    def records(self, start: PhysicalOffset, *, check_crc: bool = True) -> Iterator[WalkedRecord]:
        """Records from `start` on, up to the first place that is not one."""
        return iter(self.commit_log.walk(start, check_crc=check_crc))

    def record_at(self, physical_offset: PhysicalOffset) -> WalkedRecord | None:
        """The record that begins at this offset, its body unchecked; None when none does."""
        record = next(iter(self.commit_log.walk(physical_offset)), None)
        return record if record is not None and record.physical_offset == physical_offset else None

    def next_record(self, offset: PhysicalOffset) -> PhysicalOffset | None:
        """Where the next whole record begins, at `offset` or behind it, whatever lies in between."""
        for segment in self.segments:
            if segment.start + segment.size > offset:
                found = find_record(segment, max(0, offset - segment.start), self.commit_log)
                if found is not None:
                    return found
        return None

    def has_data_from(self, offset: PhysicalOffset) -> bool:
        """Is there anything but zeros from `offset` to the end of the last file?"""
        return any(
            segment.has_data_from(max(0, offset - segment.start))
            for segment in self.segments
            if segment.start + segment.size > offset
        )

    def recovery_start(self) -> PhysicalOffset:
        """Where the next start after a crash begins to read: the file that the checkpoint vouches for."""
        limit = self.checkpoint.safe_timestamp(with_index=self.config.message_index_safe)
        for segment in reversed(list(self.segments)):
            if self.record_at(segment.start) and 0 < self.commit_log.store_timestamp_at(segment.start) <= limit:
                return segment.start
        return PhysicalOffset(max(0, self.segments.min_offset))

    def last_segment_with_data(self) -> Segment | None:
        return next((segment for segment in reversed(list(self.segments)) if segment.has_data_from(0)), None)


def _numbered_directories(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return sorted(one.name for one in entries if one.name.isascii() and one.name.isdecimal() and one.is_dir())


def _sizes_in(directory: Path) -> dict[str, int]:
    sizes = {}
    with os.scandir(directory) as entries:
        for one in entries:
            with contextlib.suppress(FileNotFoundError):  # expired meanwhile
                sizes[one.name] = one.stat().st_size
    return dict(sorted(sizes.items()))


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # expired meanwhile
        return None


def _most_common(sizes: Iterator[int]) -> int | None:
    counted = Counter(size for size in sizes if size)
    return counted.most_common(1)[0][0] if counted else None
