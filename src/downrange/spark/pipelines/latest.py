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

from downrange.spark.data_source import arrow_schema
from downrange.spark.lake.location import Location
from downrange.spark.offsets import VERSION
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.frames import chosen_schema
from downrange.spark.pipelines.latest_table import SCHEMA, LatestTable, joined, keyed
from downrange.spark.pipelines.task_reader import TaskReader, run_batches

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
    keyless: int = 0
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    behind: int | None = None


class Part(NamedTuple):
    """What a task found: the newest row of each key, and how many messages there were."""

    rows: pa.Table
    messages: int
    keyless: int


class LatestReader(TaskReader):
    """Plans batches on the driver; `newest` runs on copies, on workers."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options, arrow_schema(chosen_schema(["keys", *SCHEMA.names])))

    def newest(self, task: InputPartition) -> Part:
        """Runs on a worker: the newest message of each key in the ranges of a task."""
        found = SCHEMA.empty_table()
        messages = keyless = 0
        for batch in self.read(task):
            rows = keyed(batch)
            messages += batch.num_rows
            column = batch.column("keys")
            keyless += sum(not (keys and keys.strip()) for keys in column.to_pylist())
            found = joined([found, rows])
        return Part(found, messages, keyless)


def checked(options: Mapping[str, str], seconds_between_batches: float) -> SourceOptions:
    """The options with their defaults; raises an error when they are wrong."""
    wanted = parse_options({**_DEFAULTS, **options})
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
    until_caught_up: bool = True,
    seconds_between_batches: float = 10.0,
    on_progress: Callable[[LatestProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> LatestProgress:
    """Bring the table up to date with the messages that the options of `rocketmq` choose.

    `table` is a directory or a URL, which is created if missing; `storage_options` are for its object store. Messages
    with an empty body, and those with the tag `delete_tag`, delete their keys. Returns when caught up, or, with
    `until_caught_up` False, when `stop` is set.
    """
    wanted = checked(options, seconds_between_batches)
    topics = options.get("subscribe") or options.get("subscribePattern") or options.get("assign") or ""
    with told_in_one_line():
        run = _Run(spark, LatestTable(Location.of(table, storage_options), topics, delete_tag), wanted)
        run.run(None if until_caught_up else seconds_between_batches, on_progress or (lambda _: None), stop)
        return run.progress


class _Run:
    """One run from start to end, in one thread."""

    def __init__(self, spark: SparkSession, table: LatestTable, options: SourceOptions) -> None:
        self._spark = spark.sparkContext
        self._table = table
        self._reader = LatestReader(options)
        self._reader.parallelism = self._spark.defaultParallelism
        self.progress = LatestProgress()

    def run(
        self, seconds: float | None, on_progress: Callable[[LatestProgress], None], stop: threading.Event | None
    ) -> None:
        position = self._table.position

        def told(behind: int) -> None:
            self.progress.behind = behind
            if self.progress.batches % _BATCHES_BETWEEN_TIDYING == _BATCHES_BETWEEN_TIDYING - 1:
                self._table.tidy(forget=behind == 0)
            on_progress(self.progress)

        run_batches(
            self._reader,
            None if position is None else {"v": VERSION, "q": position},
            self._reader.initialOffset,
            self._batch,
            seconds=seconds,
            on_progress=told,
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
        progress.keyless += sum(part.keyless for part in parts)
        progress.inserted += done["inserted"]
        progress.updated += done["updated"]
        progress.deleted += done["deleted"]
