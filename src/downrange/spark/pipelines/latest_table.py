"""The Delta table of the newest message per key, and the rules that say which message is the newest.

A batch is one commit, which also has the position of the next batch: the table is all that the pipeline remembers.
Deleted keys are remembered for a while in a second table, `_deleted`: a message that is older than the deletion of its
key, and is read after it from another queue, must not bring the key back. They are written before the batch is
committed. If the process dies in between, they are still true, and the batch is planned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError

from downrange.spark.lake.layout import LakeBusy, LakeError
from downrange.spark.lake.location import Location, storage_errors
from downrange.spark.offsets import Tree

TITLE: Final = "newest messages per key, by downrange"
METADATA: Final = "latest"
APPLICATION: Final = "downrange-latest"
DELETED: Final = "_deleted"
KEEP_HOURS: Final = 168
"""How long deletions are remembered, and files that were replaced stay for their readers."""
_FILES_TO_JOIN: Final = 32
# The newer of two messages has the later store time; on one broker, messages of one moment follow by their place in its
# log, whatever queues they are in.
VERSION_COLUMNS: Final = ("store_time", "physical_offset", "broker")
_TIME: Final = pa.timestamp("us", "UTC")
SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("body", pa.binary()),
        pa.field("tags", pa.string()),
        pa.field("unique_key", pa.string()),
        pa.field("born_time", _TIME),
        pa.field("store_time", _TIME),
        pa.field("topic", pa.string()),
        pa.field("broker", pa.string()),
        pa.field("queue_id", pa.int32()),
        pa.field("queue_offset", pa.int64()),
        pa.field("physical_offset", pa.int64()),
    ]
)
_DELETED_SCHEMA: Final = pa.schema([SCHEMA.field(name) for name in ("key", *VERSION_COLUMNS)])


def keyed(messages: pa.RecordBatch) -> pa.Table:
    """A row for each key of each message: `keys` has them separated by blanks. Messages without a key are left out."""
    table = pa.Table.from_batches([messages])
    lists = pc.split_pattern(table["keys"].combine_chunks(), " ")
    rows = table.take(pc.list_parent_indices(lists))
    rows = rows.append_column("key", pc.list_flatten(lists)).select(SCHEMA.names)
    return rows.filter(pc.greater(pc.utf8_length(rows["key"]), 0)).cast(SCHEMA)


def newest(rows: pa.Table) -> pa.Table:
    """The newest row of each key."""
    if rows.num_rows < 2:
        return rows
    rows = rows.sort_by([("key", "ascending"), *((name, "descending") for name in VERSION_COLUMNS)])
    keys = rows["key"].combine_chunks()
    is_first = pc.not_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
    return rows.filter(pa.chunked_array([pa.array([True]), is_first]))


def is_deletion(rows: pa.Table, tag: str | None) -> pa.ChunkedArray:
    """Whether a row deletes its key: by an empty body, which not every client can send, or by the tag."""
    is_empty = pc.equal(pc.fill_null(pc.binary_length(rows["body"]), 0), 0)
    return is_empty if tag is None else pc.or_(is_empty, pc.fill_null(pc.equal(rows["tags"], tag), False))


def _newer(columns: tuple[str, ...] = VERSION_COLUMNS) -> str:
    """SQL that says whether the row `s` is newer than the row `t`."""
    first, *rest = columns
    deeper = f" OR (s.{first} = t.{first} AND ({_newer(tuple(rest))}))" if rest else ""
    return f"s.{first} > t.{first}{deeper}"


class LatestTable:
    """One table. Belongs to one thread; of two processes that write to it, the second to commit fails."""

    def __init__(self, location: Location, topics: str, delete_tag: str | None = None) -> None:
        self.location = location
        self._delete_tag = delete_tag
        self._topics = topics
        self._options = dict(location.storage_options)
        self._deleted: dict[str, tuple[Any, ...]] = {}
        """The version of each deletion that is remembered, by key."""
        with storage_errors(location):
            if not DeltaTable.is_deltatable(location.url, self._options):
                if location.has_files():
                    raise LakeError(f"{location} is not a table and not empty")
                DeltaTable.create(location.url, SCHEMA, mode="ignore", description=TITLE, storage_options=self._options)
            self._table = DeltaTable(location.url, storage_options=self._options)
            if self._table.metadata().description != TITLE:
                raise LakeError(f"{location} is a Delta table that `pipeline latest` has not made")
            self.batch, self.position = self._read_state()
            self._load_deleted()

    def __repr__(self) -> str:
        return f"<LatestTable {self.location} at batch {self.batch}>"

    @property
    def _deleted_url(self) -> str:
        return f"{self.location.url}/{DELETED}"

    def _read_state(self) -> tuple[int, Tree | None]:
        """The number of the last batch, and the start of the next one; -1 and None before the first."""
        for limit in (1, 32, None):
            for commit in self._table.history(limit):
                if (state := commit.get(METADATA)) is not None:
                    if state["topics"] != self._topics:
                        raise LakeError(
                            f"{self.location} has the keys of {state['topics']}: name another table for {self._topics}"
                        )
                    return state["batch"], state["position"]
        if self._table.version() > 0:
            raise LakeError(f"{self.location}: no commit of this pipeline is left in the log, only of other programs")
        return -1, None

    def _load_deleted(self) -> None:
        if DeltaTable.is_deltatable(self._deleted_url, self._options):
            found = DeltaTable(self._deleted_url, storage_options=self._options)
            self._remember(pa.table(found.to_pyarrow_table()))

    def _remember(self, rows: pa.Table) -> None:
        for key, *version in zip(*(rows[name].to_pylist() for name in _DELETED_SCHEMA.names), strict=True):
            self._deleted[key] = max(tuple(version), self._deleted.get(key, tuple(version)))

    def commit_batch(self, rows: pa.Table, position: Tree) -> Mapping[str, int]:
        """Merge the newest rows of a batch; returns the numbers of keys inserted, updated and deleted."""
        rows = self._without_stale(rows)
        deletions = rows.filter(is_deletion(rows, self._delete_tag)).select(_DELETED_SCHEMA.names)
        state = {"topics": self._topics, "batch": self.batch + 1, "position": position}
        with storage_errors(self.location):
            if deletions.num_rows:
                write_deltalake(self._deleted_url, deletions, mode="append", storage_options=self._options)
                self._remember(deletions)
            try:
                done = self._merge(rows, self._commit_as(state)) if rows.num_rows else {}
                if self._table.transaction_version(APPLICATION) != state["batch"]:  # nothing had to be changed
                    self._table.create_write_transaction(
                        [], "append", self._table.schema(), [], commit_properties=self._commit_as(state)
                    )
                    self._table.update_incremental()
            except CommitFailedError:
                raise LakeBusy(f"another process has written to {self.location} at the same time") from None
        self.batch, self.position = self.batch + 1, position
        return {name: done.get(f"num_target_rows_{name}", 0) for name in ("inserted", "updated", "deleted")}

    def _without_stale(self, rows: pa.Table) -> pa.Table:
        """The rows that are not older than a deletion of their key."""
        if not self._deleted or not rows.num_rows:
            return rows
        columns = (rows[name].to_pylist() for name in _DELETED_SCHEMA.names)
        versions = ((key, tuple(version)) for key, *version in zip(*columns, strict=True))
        return rows.filter(pa.array([self._is_current(*one) for one in versions]))

    def _is_current(self, key: str, version: tuple[Any, ...]) -> bool:
        deleted = self._deleted.get(key)
        return deleted is None or version >= deleted

    def _merge(self, rows: pa.Table, commit: CommitProperties) -> Mapping[str, Any]:
        rows = rows.append_column("is_deletion", is_deletion(rows, self._delete_tag))
        columns = {name: f"s.{name}" for name in SCHEMA.names}
        return (
            self._table.merge(rows, "s.key = t.key", "s", "t", commit_properties=commit)
            .when_matched_delete(f"s.is_deletion AND ({_newer()})")
            .when_matched_update(columns, f"NOT s.is_deletion AND ({_newer()})")
            .when_not_matched_insert(columns, "NOT s.is_deletion")
            .execute()
        )

    def _commit_as(self, state: Mapping[str, Any]) -> CommitProperties:
        return CommitProperties(
            custom_metadata={METADATA: state},
            max_commit_retries=0,
            app_transactions=[Transaction(APPLICATION, state["batch"])],
        )

    def tidy(self, *, forget: bool) -> None:
        """Join small files and delete old ones; `forget` also old deletions, when no message is behind."""
        with storage_errors(self.location):
            if len(self._table.file_uris()) > _FILES_TO_JOIN:
                state = {"topics": self._topics, "batch": self.batch, "position": self.position}
                self._table.optimize.compact(commit_properties=CommitProperties(custom_metadata={METADATA: state}))
            self._table.vacuum(KEEP_HOURS, dry_run=False)
            if forget and self._deleted:
                oldest = datetime.now(UTC) - timedelta(hours=KEEP_HOURS)
                if forgotten := [key for key, version in self._deleted.items() if version[0] < oldest]:
                    deleted = DeltaTable(self._deleted_url, storage_options=self._options)
                    deleted.delete(f"store_time < TIMESTAMP '{oldest.isoformat()}'")
                    for key in forgotten:
                        del self._deleted[key]


def joined(tables: Iterable[pa.Table]) -> pa.Table:
    """The newest row of each key in all tables."""
    return newest(pa.concat_tables([SCHEMA.empty_table(), *tables]))
