"""Archives topics into a lake, every message once.

For each batch the driver asks for the ends of the queues, tasks write new messages into files (archive_reader.py), and
the driver commits the files together with the start of the next batch. This commit, one version of the lake's Delta
table, is all that an archive remembers. If a process dies before it, the files do not count, and the batch is planned
again.

This is not a streaming query: its source process, its logs of offsets and commits and its planning took more CPU than
archiving half a million messages, for a promise that the table gives already.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from downrange.client.pipeline_status import PipelineStatus
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeBusy, LakeFile, checked_name
from downrange.spark.offsets import VERSION
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.pipelines.archive_reader import ArchiveReader
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.seen import Reports, as_group
from downrange.spark.pipelines.task_reader import Look, run_batches

KIND: Final = "archive"
NAME: Final = "archive"
_DEFAULTS: Final = {
    "startingOffsets": "earliest",
    "includeProperties": "true",  # a replay needs the properties
    "maxOffsetsPerTrigger": "2000000",
    "maxRecordsPerPartition": "1000000",
}


@dataclass(slots=True)
class ArchiveProgress:
    """The progress of a run. `behind` is the number of messages not in the lake yet; None: not known yet."""

    batches: int = 0
    messages: int = 0
    files: int = 0
    bytes: int = 0
    behind: int | None = None


def archive(
    spark: SparkSession,
    lake: str | Path,
    options: Mapping[str, str],
    *,
    storage_options: Mapping[str, str] | None = None,
    name: str = NAME,
    kind: str = KIND,
    until_caught_up: bool = True,
    seconds_between_batches: float = 10.0,
    on_progress: Callable[[ArchiveProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> ArchiveProgress:
    """Archive the messages that the options of `rocketmq` choose. Returns when caught up, or when `stop` is set.

    `lake` is a directory or a URL, which is created if missing; `storage_options` are for its object store. A batch
    under way is finished first. Several archives of different topics may share a lake, each under a `name`; of two
    drivers of one archive the first to commit goes on, and the other one ends with LakeBusy.

    The progress is also committed as the group `<kind>_<name>`, unless the options name a group, and told to `downrange
    pipeline list`.
    """
    wanted = checked(options, name, seconds_between_batches, kind=kind)
    target = Lake.create(lake, storage_options)
    status = PipelineStatus(name, kind, wanted.choice, str(target.location))
    with Reports(wanted, status) as reports, told_in_one_line():
        run = _Run(spark, target, name, wanted, reports)
        run.run(None if until_caught_up else seconds_between_batches, on_progress or (lambda _: None), stop)
        return run.progress


def checked(
    options: Mapping[str, str], name: str, seconds_between_batches: float, *, kind: str = KIND
) -> SourceOptions:
    """The options with their defaults; raises an error when they are wrong."""
    checked_name(name)
    wanted = parse_options({**_DEFAULTS, **as_group(options, kind, name)})
    if not 0 < seconds_between_batches < math.inf:
        raise PipelineError(f"{seconds_between_batches:g} seconds between batches: expected more than 0")
    return wanted


class _Run:
    """One archive from start to end, in one thread."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str, options: SourceOptions, reports: Reports) -> None:
        self._spark = spark.sparkContext
        self._lake = lake
        self._name = name
        self._reports = reports
        self._reader = ArchiveReader(options, lake.location, self._spark.defaultParallelism)
        self._number = 0
        """The number of the next batch. The lake takes each number once: of two drivers of an archive one fails."""
        self.progress = ArchiveProgress()

    def run(
        self, seconds: float | None, on_progress: Callable[[ArchiveProgress], None], stop: threading.Event | None
    ) -> None:
        """Archive with `seconds` between batches; None: until all messages that exist now are archived."""
        known = self._lake.state
        position = known.positions.get(self._name)
        self._number = 0 if position is None else position.batch + 1

        def on_look(look: Look) -> None:
            self.progress.behind = look.behind
            self._reports.tell(look, self.progress.messages, self.progress.bytes)
            on_progress(self.progress)

        run_batches(
            self._reader,
            None if position is None else {"v": VERSION, "q": position.next},
            lambda: self._reader.first_offset(known.ends),
            self._batch,
            seconds=seconds,
            on_look=on_look,
            stop=stop,
        )

    def _batch(self, begin: dict[str, Any], end: dict[str, Any]) -> None:
        tasks = self._reader.partitions(begin, end)
        written: list[LakeFile] = []
        if tasks:
            for files in self._spark.parallelize(tasks, len(tasks)).map(self._reader.write).collect():
                written += files
        if not self._lake.commit_batch(self._name, self._number, written, end["q"]):
            raise LakeBusy(f"another archive {self._name} has written to {self._lake.location} at the same time")
        self._number += 1
        if written:
            self.progress.batches += 1
        self.progress.messages += sum(file.rows for file in written)
        self.progress.files += len(written)
        self.progress.bytes += sum(file.bytes for file in written)
