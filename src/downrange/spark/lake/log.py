"""The log of the Delta table of a lake: what every commit carries along, and how a commit is made.

A commit succeeds only as the next version after the one that was checked; when another process was faster, the check is
done again on its result. So commits of all archives and compactions are one after another, and none relies on rules of
the library about which concurrent commits disturb each other.

Every commit of ours has the state of the lake in its metadata: positions of archives and ends of queues. The newest
commit that has one is right, whatever commits of other programs follow it.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from downrange.spark.data_source import arrow_schema
from downrange.spark.lake.layout import PARTITIONS, LakeBusy, LakeError, LakeFile
from downrange.spark.lake.location import Location, storage_errors
from downrange.spark.lake.parquet_file import STATISTICS
from downrange.spark.offsets import Tree
from downrange.spark.schema import message_schema

METADATA: Final = "downrange"
"""The name of the state in the metadata of a commit."""
SCHEMA: Final = pa.schema([*arrow_schema(message_schema(include_properties=True)), ("date", pa.date32())])
_ATTEMPTS: Final = 100
_CONFIGURATION: Final = {"delta.dataSkippingStatsColumns": ",".join(STATISTICS)}


class Position(msgspec.Struct, frozen=True):
    """The last batch of an archive, and the start of the next one: the next offset per topic, broker and queue."""

    batch: int
    next: Tree


class LakeState(msgspec.Struct, frozen=True):
    """What a lake knows beside its files. `ends`: the offset behind all messages of a queue that ever were in it."""

    positions: dict[str, Position] = {}
    ends: Tree = {}
    commit: str = ""
    """A random name of the commit: whoever got no answer to a commit can see whether it was made."""


class Change(NamedTuple):
    """One commit: files that count from now on, files that no longer do, the new state, and a number to remember."""

    add: Sequence[LakeFile]
    remove: Sequence[LakeFile]
    state: LakeState
    application: tuple[str, int] | None = None


class DeltaLog:
    """The log of one lake. Belongs to one thread; any number of processes may have one."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._table: DeltaTable | None = None
        self._known: tuple[int, LakeState] | None = None
        self._synced: set[Path] = set()

    def create(self) -> None:
        """Create the table if it is missing."""
        with storage_errors(self._location):
            DeltaTable.create(
                self._location.url,
                SCHEMA,
                mode="ignore",
                partition_by=list(PARTITIONS),
                configuration=_CONFIGURATION,
                storage_options=self._options,
                commit_properties=CommitProperties(custom_metadata={METADATA: msgspec.to_builtins(LakeState())}),
            )

    @property
    def is_there(self) -> bool:
        with storage_errors(self._location):
            return DeltaTable.is_deltatable(self._location.url, self._options)

    @property
    def _options(self) -> dict[str, str]:
        return dict(self._location.storage_options)

    def table(self) -> DeltaTable:
        """The table as it is now."""
        with storage_errors(self._location):
            if self._table is None:
                try:
                    self._table = table_at(self._location)
                except TableNotFoundError:
                    raise LakeError(f"{self._location} is not a lake: it has no Delta table") from None
                if self._table.metadata().partition_columns != list(PARTITIONS):
                    raise LakeError(f"{self._location} is a Delta table that no archive has made")
            else:
                self._table.update_incremental()
            return self._table

    def state(self) -> LakeState:
        table = self.table()
        version = table.version()
        if self._known is None or self._known[0] != version:
            with storage_errors(self._location):
                self._known = version, self._read_state(table, version)
        return self._known[1]

    def _read_state(self, table: DeltaTable, version: int) -> LakeState:
        """The state in the newest commit that has one."""
        newer = (1, 32, None) if self._known is None else (version - self._known[0],)
        for limit in newer:
            for commit in table.history(limit):
                if METADATA in commit:
                    return msgspec.convert(commit[METADATA], LakeState)
        if self._known is None:
            raise LakeError(f"{self._location}: no commit of an archive is left in the log, only of other programs")
        return self._known[1]

    def commit(self, build: Callable[[DeltaTable, LakeState], Change | None]) -> bool:
        """Commit the change that `build` makes of the present table and its state. False when it makes none.

        `build` is called again when another process has committed first; it raises LakeError if the change is no longer
        right. It must not refresh the table: the commit follows the version that it was given.
        """
        name = uuid.uuid4().hex
        for attempt in range(_ATTEMPTS):
            state = self.state()
            if state.commit == name:
                break  # no answer had come, and the commit was made all the same
            assert self._table is not None
            change = build(self._table, state)
            if change is None:
                return False
            if self._try(self._table, change, name):
                break
            time.sleep(random.random() * 0.01 * min(attempt, 20))  # noqa: S311
        else:
            raise LakeBusy(f"{self._location}: {_ATTEMPTS} commits of others came first; try again")
        assert self._known is not None
        self._location.sync_file(f"_delta_log/{self._known[0]:020}.json")
        return True

    def _try(self, table: DeltaTable, change: Change, name: str) -> bool:
        self._location.sync_names((file.path for file in change.add), self._synced)
        now = time.time_ns() // 1_000_000
        is_new = not change.remove  # a compaction changes no data
        actions: list[AddAction | RemoveAction] = [
            AddAction(file.path, file.bytes, _partition(file), now, is_new, file.statistics) for file in change.add
        ]
        actions += [RemoveAction(file.path, False, now, file.bytes, _partition(file)) for file in change.remove]
        state = msgspec.structs.replace(change.state, commit=name)
        with storage_errors(self._location):
            try:
                table.create_write_transaction(
                    actions,
                    "append",
                    SCHEMA,
                    list(PARTITIONS),
                    commit_properties=CommitProperties(
                        custom_metadata={METADATA: msgspec.to_builtins(state)},
                        max_commit_retries=0,
                        app_transactions=[] if change.application is None else [Transaction(*change.application)],
                    ),
                )
            except CommitFailedError:
                return False
        self._known = table.version() + 1, state
        return True


def _partition(file: LakeFile) -> dict[str, str | None]:
    return {"topic": file.topic, "date": file.date}


def table_at(location: Location, version: int | None = None) -> DeltaTable:
    """The table of a lake at one version, the newest unless given."""
    return DeltaTable(location.url, version, dict(location.storage_options))


def files_of(table: DeltaTable) -> list[LakeFile]:
    """The files that count in this version of the table."""
    return [_file_of(row) for row in pa.table(table.get_add_actions(flatten=True)).to_pylist()]


def _file_of(row: Mapping[str, Any]) -> LakeFile:
    """The file of one row of `DeltaTable.get_add_actions(flatten=True)`."""
    found: dict[str, dict[str, Any]] = {"min": {}, "max": {}, "null_count": {}}
    for name, value in row.items():
        kind, _, column = name.partition(".")
        if kind in found and value is not None:
            found[kind][column] = value
    return LakeFile(
        unquote(row["path"]),
        row["partition.topic"],
        str(row["partition.date"]),
        row["num_records"],
        row["size_bytes"],
        found["min"],
        found["max"],
        found["null_count"],
    )
