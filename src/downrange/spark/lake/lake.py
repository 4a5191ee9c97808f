"""A lake: a directory of Parquet files with a manifest that says which files count.

Order of a commit: files are written under temporary names; the manifest gets an entry, and from then on they count;
then they are renamed, and the files they replace are removed. `settle`, which every writer calls first, repairs the
lake after a crash in between.

A reader that asks the manifest (`Lake.paths`) sees each commit completely or not at all. A reader that takes all
*.parquet files never sees a file that does not count yet. It may miss the files of a commit until they are renamed, and
during a compaction it may see a message both in the old and in the new file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from downrange.spark.lake import files
from downrange.spark.lake.layout import REPLAY, TEMPORARY, LakeError, checked_name
from downrange.spark.lake.manifest import Contents, Entry, LakeFile, Manifest
from downrange.spark.offsets import Tree

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.dataset

SNAPSHOT_ENTRIES: Final = 64
"""This many entries are joined into a snapshot."""


class Lake:
    """One lake. Any number of processes may read; writers of the same name exclude each other (`writing`)."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # Spark's processes have working directories of their own
        self._manifest = Manifest(self.root)

    def __repr__(self) -> str:
        return f"<Lake {self.root}>"

    @classmethod
    def create(cls, root: Path) -> Lake:
        """The lake at `root`, created if missing; a directory that has other files is refused."""
        lake = cls(root)
        if not lake._manifest.is_there:
            try:
                if root.exists() and any(root.iterdir()):
                    raise LakeError(f"{root} is not a lake and not empty")
                lake._manifest.create()
            except OSError as error:
                raise LakeError(f"cannot make a lake at {root}: {error.strerror or error}") from None
        return lake

    @classmethod
    def open(cls, root: Path) -> Lake:
        lake = cls(root)
        if not lake._manifest.is_there:
            raise LakeError(f"{root} is not a lake: it has no manifest")
        return lake

    def replay_state(self, name: str) -> Path:
        return self.root / REPLAY / f"{checked_name(name)}.json"

    def contents(self) -> Contents:
        return self._manifest.read()

    def files(
        self, topics: Sequence[str] = (), begin_millis: int | None = None, end_millis: int | None = None
    ) -> list[LakeFile]:
        """The files that count now, by day: of these topics, with messages stored in this span, ends included."""
        wanted = set(topics)
        found = [
            file
            for file in self.contents().files.values()
            if (not wanted or file.topic in wanted)
            and (begin_millis is None or file.max_store_millis >= begin_millis)
            and (end_millis is None or file.min_store_millis <= end_millis)
        ]
        return sorted(found, key=lambda file: (file.date, file.path))

    def path_of(self, file: LakeFile) -> Path:
        """The present path of a file: a crash may have left it under its temporary name."""
        path = self.root / file.path
        if not path.exists() and (temporary := self.root / file.temporary).exists():
            return temporary
        return path

    def dataset(
        self, topics: Sequence[str] = (), begin_millis: int | None = None, end_millis: int | None = None
    ) -> pyarrow.dataset.Dataset:
        """The files as one Arrow dataset, with the columns `topic` and `date` beside those in the files."""
        # Imported here because it imports pandas, for which tasks that only write would have to wait.
        import pyarrow.dataset
        import pyarrow.fs

        chosen = self.files(topics, begin_millis, end_millis)
        if not chosen:
            raise LakeError(f"{self.root} has no such messages")
        return pyarrow.dataset.FileSystemDataset(
            [_fragment(self.path_of(file), file) for file in chosen],
            _schema(self.path_of(chosen[-1])),
            pyarrow.dataset.ParquetFileFormat(),
            filesystem=pyarrow.fs.LocalFileSystem(),
        )

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """The right to write under this name; unfinished work of an earlier writer is finished or removed first."""
        temporary = self.root / TEMPORARY / checked_name(name)
        temporary.mkdir(parents=True, exist_ok=True)
        with files.exclusive(temporary.with_name(f"{name}.lock"), f"pipeline {name}"):
            self.settle()
            for path in temporary.iterdir():  # files that count were moved; the rest belonged to tasks that died
                files.remove(path)
            yield

    def commit_batch(self, query: str, batch: int, written: Sequence[LakeFile], position: Tree | None = None) -> bool:
        """Make the files that the tasks of a batch wrote count, and remember `position` as the start of the next batch.

        This is done once, however often the batch is run. True when the batch was new.
        """

        def build(contents: Contents) -> Entry | None:
            if contents.has_batch(query, batch) or not (written or position is not None):
                return None
            now = time.time_ns() // 1_000_000
            return Entry("batch", tuple(written), query=query, batch=batch, position=position, time_millis=now)

        entry = self._manifest.commit(build)
        if entry is None:
            for file in written:
                files.remove(self.root / file.temporary)
            return False
        self._put_in_place(entry)
        return True

    def commit_compaction(self, old: Sequence[LakeFile], new: LakeFile) -> None:
        """Replace the files `old` by `new`. Fails when one of them no longer counts."""
        removed = tuple(file.path for file in old)
        entry = self._manifest.commit(
            lambda _: Entry("compaction", (new,), removed, time_millis=time.time_ns() // 1_000_000)
        )
        assert entry is not None
        self._put_in_place(entry)

    def settle(self) -> None:
        """Finish commits that a crash interrupted; then join the entries if there are many."""
        contents, recent = self._manifest.recent()
        for entry in recent:
            live = tuple(file for file in entry.add if file.path in contents.files)
            self._put_in_place(Entry(entry.kind, live, entry.remove))
        if len(recent) >= SNAPSHOT_ENTRIES:
            self._manifest.snapshot()

    def _put_in_place(self, entry: Entry) -> None:
        """Move the files of an entry. Every step may have been done before, or at the same time by another process."""
        directories = set()
        for file in entry.add:
            target = self.root / file.path
            if not target.parent.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                directories |= {target.parent.parent, self.root}
            try:
                os.replace(self.root / file.temporary, target)
            except FileNotFoundError:
                # The file was moved already, or a compaction has replaced and removed it in the meantime.
                if not target.exists() and file.path in self.contents().files:
                    raise LakeError(f"{target} is lost: the manifest has it and the disk has not") from None
                continue
            directories.add(target.parent)
        for directory in directories:
            files.sync_directory(directory)
        for path in entry.remove:
            files.remove(self.root / path)


def _schema(path: Path) -> pyarrow.Schema:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(path).remove_metadata()
    return pyarrow.schema([("topic", pyarrow.string()), ("date", pyarrow.string()), *schema])


def _fragment(path: Path, file: LakeFile) -> pyarrow.dataset.Fragment:
    import pyarrow.dataset
    import pyarrow.fs

    known = (pyarrow.dataset.field("topic") == file.topic) & (pyarrow.dataset.field("date") == file.date)
    return pyarrow.dataset.ParquetFileFormat().make_fragment(
        str(path), filesystem=pyarrow.fs.LocalFileSystem(), partition_expression=known
    )
