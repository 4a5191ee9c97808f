"""A lake: archived messages as a Delta table, partitioned by topic and day.

Workers write files; a commit makes them count (log.py). Readers of Delta tables see each commit whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Final

from downrange.spark.lake.layout import REPLAY, LakeError, LakeFile, checked_name
from downrange.spark.lake.location import Location, storage_errors
from downrange.spark.lake.log import Change, DeltaLog, LakeState, Position, files_of
from downrange.spark.offsets import Tree, next_offset

if TYPE_CHECKING:
    import pyarrow.dataset
    from deltalake import DeltaTable

VACUUM_HOURS: Final = 168
"""A file that does not count is deleted after so long: the table's readers, and batches under way, must be done."""


class Lake:
    """One lake. Belongs to one thread; any number of processes may read it and write to it."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self._log = DeltaLog(location)

    def __repr__(self) -> str:
        return f"<Lake {self.location}>"

    @classmethod
    def create(cls, place: str | Path, storage_options: Mapping[str, str] | None = None) -> Lake:
        """The lake at a directory or URL, created if missing; a place that has other files is refused."""
        lake = cls(Location.of(place, storage_options))
        if not lake._log.is_there:
            if lake.location.has_files():
                raise LakeError(f"{lake.location} is not a lake and not empty")
            lake._log.create()
        lake._log.table()
        return lake

    @classmethod
    def open(cls, place: str | Path, storage_options: Mapping[str, str] | None = None) -> Lake:
        """The lake at a directory or URL, which must be there; `storage_options` are for its object store."""
        lake = cls(Location.of(place, storage_options))
        lake._log.table()
        return lake

    @property
    def table(self) -> DeltaTable:
        """The Delta table as it is now, for readers."""
        return self._log.table()

    @property
    def state(self) -> LakeState:
        """How far each archive is, and where each queue ends in the lake."""
        return self._log.state()

    def files(
        self, topics: Sequence[str] = (), begin_millis: int | None = None, end_millis: int | None = None
    ) -> list[LakeFile]:
        """The files that count now, by day: of these topics, with messages stored in this span, ends included."""
        wanted = set(topics)
        found = [
            file
            for file in self._files_of(self.table)
            if (not wanted or file.topic in wanted) and file.is_in_span(begin_millis, end_millis)
        ]
        return sorted(found, key=lambda file: (file.date, file.path))

    def _files_of(self, table: DeltaTable) -> list[LakeFile]:
        with storage_errors(self.location):
            return files_of(table)

    def dataset(self, topics: Sequence[str] = ()) -> pyarrow.dataset.Dataset:
        """The messages as an Arrow dataset, which leaves out files that cannot match a filter."""
        import pyarrow.dataset

        with storage_errors(self.location):
            found = self.table.to_pyarrow_dataset(filesystem=self.location.filesystem())
        return found.filter(pyarrow.dataset.field("topic").isin(list(topics))) if topics else found

    def commit_batch(self, name: str, batch: int, written: Sequence[LakeFile], position: Tree) -> bool:
        """Make the files that the tasks of a batch wrote count, and remember `position` as the start of the next batch.

        False when the archive `name` has this batch already, by another driver.
        """

        def build(_: DeltaTable, state: LakeState) -> Change | None:
            known = state.positions.get(checked_name(name))
            if known is not None and known.batch >= batch:
                return None
            positions = {**state.positions, name: Position(batch, position)}
            grown = LakeState(positions, _grown(state.ends, written))
            return Change(written, (), grown, (name, batch))

        return self._log.commit(build)

    def commit_compaction(self, old: Sequence[LakeFile], new: Sequence[LakeFile]) -> None:
        """Replace the files `old` by `new`. Fails when one of them no longer counts."""

        def build(table: DeltaTable, state: LakeState) -> Change:
            counting = {file.path for file in self._files_of(table)}
            if missing := [file.path for file in old if file.path not in counting]:
                raise LakeError(f"{missing[0]} is no longer part of the lake: another process has replaced it")
            return Change(new, old, state)

        self._log.commit(build)

    def vacuum(self, hours: int = VACUUM_HOURS) -> int:
        """Delete files that have not counted for so long, and old parts of the log; returns the number of files."""
        table = self.table
        with storage_errors(self.location):
            removed = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
            table.update_incremental()
            table.create_checkpoint()
            table.cleanup_metadata()
        return len(removed)

    def begin_run(self, name: str) -> int:
        """The number of a new run of the replay `name`. A run that began before must stop: see `last_run`."""
        number = 0

        def build(table: DeltaTable, state: LakeState) -> Change:
            nonlocal number
            number = (table.transaction_version(f"{REPLAY}/{name}") or 0) + 1
            return Change((), (), state, (f"{REPLAY}/{name}", number))

        self._log.commit(build)
        return number

    def last_run(self, name: str) -> int:
        """The number of the newest run of the replay `name`."""
        return self.table.transaction_version(f"{REPLAY}/{name}") or 0


def _grown(ends: Tree, written: Sequence[LakeFile]) -> Tree:
    """The ends of queues with these files; raises LakeError when they have messages that are in the lake already."""
    grown = deepcopy(ends)
    for file in written:
        for queue, start, stop, _ in file.queues:
            known = next_offset(ends, queue)
            if start < known:
                raise LakeError(
                    f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name}: offset {start} is in the lake "
                    f"already, which is at {known}; was the broker's store created again?"
                )
            queues = grown.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})
            queues[str(queue.queue_id)] = max(stop, queues.get(str(queue.queue_id), 0))
    return grown
