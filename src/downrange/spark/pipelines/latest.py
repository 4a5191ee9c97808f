"""Keeps the newest message per key of topics in a Delta table; an empty body or a certain tag deletes its keys.

For each batch, tasks read new messages and return the newest of each key, and the driver merges them into the table
(latest_table.py) together with the start of the next batch. If a process dies before this commit, the batch is planned
again; a message that was merged already is not newer than itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition

from downrange.client.pipeline_status import PipelineStatus
from downrange.spark.data_source import arrow_schema
from downrange.spark.lake.location import Location
from downrange.spark.offsets import VERSION
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.frames import chosen_schema
from downrange.spark.pipelines.latest_table import SCHEMA, LatestTable, joined, keyed
from downrange.spark.pipelines.seen import Reports, as_group
from downrange.spark.pipelines.task_reader import Look, TaskReader, run_batches

NAME: Final = "latest"
_DEFAULTS: Final = {
    "startingOffsets": "earliest",
    "maxOffsetsPerTrigger": "500000",  # the newest messages of a batch are held by the driver
    "maxRecordsPerPartition": "250000",
}
_BATCHES_BETWEEN_TIDYING: Final = 100


@dataclass(slots=True)
class LatestProgress:
    """The progress of a run. `keyless` messages have no key; `behind` is the number of messages not read yet."""

    batches: int = 0
    messages: int = 0
    bytes: int = 0
    keyless: int = 0
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    behind: int | None = None


class Part(NamedTuple):
    """The findings of a task: the newest row of each key, and how many messages and bytes the task has read."""

    rows: pa.Table
    messages: int
    bytes: int
    keyless: int


class LatestReader(TaskReader):
    """Plans batches on the driver; `newest` runs on copies, on workers."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options, arrow_schema(chosen_schema(["keys", *SCHEMA.names])))

    def newest(self, task: InputPartition) -> Part:
        """Runs on a worker: the newest message of each key in the ranges of a task."""
        found = SCHEMA.empty_table()
        messages = size = keyless = 0
        for batch in self.read(task):
            rows = keyed(batch)
            messages += batch.num_rows
            size += batch.nbytes
            column = batch.column("keys")
            keyless += sum(not (keys and keys.strip()) for keys in column.to_pylist())
            found = joined([found, rows])
        return Part(found, messages, size, keyless)


def checked(options: Mapping[str, str], seconds_between_batches: float, *, name: str = NAME) -> SourceOptions:
    """The options with their defaults; raises an error when they are wrong."""
    wanted = parse_options({**_DEFAULTS, **as_group(options, NAME, name)})
    if not 0 < seconds_between_batches < math.inf:
        raise PipelineError(f"{seconds_between_batches:g} seconds between batches: expected more than 0")
    return wanted


def latest(
    spark: SparkSession,
    table: str | Path,
    options: Mapping[str, str],
    *,
    storage_options: Mapping[str, str] | None = None,
    delete_tag: str | None = None,
    name: str = NAME,
    until_caught_up: bool = True,
    seconds_between_batches: float = 10.0,
    on_progress: Callable[[LatestProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> LatestProgress:
    """Bring the table up to date with the messages that the options of `rocketmq` choose.

    `table` is a directory or a URL, which is created if missing; `storage_options` are for its object store. Messages
    with an empty body, and those with the tag `delete_tag`, delete their keys. Returns when caught up, or, with
    `until_caught_up` False, when `stop` is set. The progress is also committed as the group `latest_<name>`, unless the
    options name a group, and told to `downrange pipeline list`.
    """
    wanted = checked(options, seconds_between_batches, name=name)
    location = Location.of(table, storage_options)
    status = PipelineStatus(name, NAME, wanted.choice, str(location))
    with Reports(wanted, status) as reports, told_in_one_line():
        run = _Run(spark, LatestTable(location, wanted.choice, delete_tag), wanted, reports)
        run.run(None if until_caught_up else seconds_between_batches, on_progress or (lambda _: None), stop)
        return run.progress


class _Run:
    """One run from start to end, in one thread."""

    def __init__(self, spark: SparkSession, table: LatestTable, options: SourceOptions, reports: Reports) -> None:
        self._spark = spark.sparkContext
        self._reports = reports
        self._table = table
        self._reader = LatestReader(options)
        self._reader.parallelism = self._spark.defaultParallelism
        self.progress = LatestProgress()

    def run(
        self, seconds: float | None, on_progress: Callable[[LatestProgress], None], stop: threading.Event | None
    ) -> None:
        position = self._table.position

        def on_look(look: Look) -> None:
            self.progress.behind = look.behind
            self._reports.tell(look, self.progress.messages, self.progress.bytes)
            if self.progress.batches % _BATCHES_BETWEEN_TIDYING == _BATCHES_BETWEEN_TIDYING - 1:
                self._table.tidy(forget=look.behind == 0)
            on_progress(self.progress)

        run_batches(
            self._reader,
            None if position is None else {"v": VERSION, "q": position},
            self._reader.initialOffset,
            self._batch,
            seconds=seconds,
            on_look=on_look,
            stop=stop,
        )
        self._table.tidy(forget=self.progress.behind == 0)

    def _batch(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        tasks = self._reader.partitions(begin, end)
        parts: list[Part] = []
        if tasks:
            parts = self._spark.parallelize(tasks, len(tasks)).map(self._reader.newest).collect()
        done = self._table.commit_batch(joined(part.rows for part in parts), end["q"])
        progress = self.progress
        progress.batches += bool(parts)
        progress.messages += sum(part.messages for part in parts)
        progress.bytes += sum(part.bytes for part in parts)
        progress.keyless += sum(part.keyless for part in parts)
        progress.inserted += done["inserted"]
        progress.updated += done["updated"]
        progress.deleted += done["deleted"]
