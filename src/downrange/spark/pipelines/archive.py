"""Topics into a lake, every message once.

A streaming query whose tasks write files (archive_source.py) and whose driver commits them, batch by batch. Spark
runs a batch again after a crash, with the same messages; the lake's manifest knows which batches it has.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import checked_name
from downrange.spark.offsets import from_json
from downrange.spark.options import parse_options
from downrange.spark.pipelines.archive_source import FORMAT, LAKE, PARALLELISM, PIPELINE, ArchiveDataSource, file_of
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.planner import waiting

NAME: Final = "archive"
_DEFAULTS: Final = {
    "startingOffsets": "earliest",
    "includeProperties": "true",  # a replay needs them
    "maxOffsetsPerTrigger": "2000000",
    "maxRecordsPerPartition": "1000000",
}
_POLL_SECONDS: Final = 1


@dataclass(slots=True)
class ArchiveProgress:
    """How far a run is. `behind` counts messages that are in the brokers and not in the lake; None: not known yet."""

    batches: int = 0
    messages: int = 0
    files: int = 0
    bytes: int = 0
    behind: int | None = None


def archive(
    spark: SparkSession,
    lake: Path,
    options: Mapping[str, str],
    *,
    name: str = NAME,
    until_caught_up: bool = True,
    seconds_between_batches: float = 10.0,
    on_progress: Callable[[ArchiveProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> ArchiveProgress:
    """Archive what the options of `rocketmq` choose. Returns when caught up; else runs until `stop` is set.

    Several archives of different topics may share a lake, each under its own `name`.
    """
    wanted = checked(options, name, seconds_between_batches)
    target = Lake.create(lake)
    with target.writing(name), told_in_one_line():
        return _Run(spark, target, name).run(
            wanted, until_caught_up, seconds_between_batches, on_progress or (lambda _: None), stop or threading.Event()
        )


def checked(options: Mapping[str, str], name: str, seconds_between_batches: float) -> dict[str, str]:
    """The options with their defaults. Raises what is wrong with them, in one line; inside Spark it would be a page."""
    wanted = {**_DEFAULTS, **options}
    parse_options(wanted)
    checked_name(name)
    if seconds_between_batches <= 0:
        raise PipelineError(f"{seconds_between_batches:g} seconds between batches: expected more than none")
    return wanted


class _Run:
    """One query from start to end. Spark calls `_commit` on a thread of its own, one batch at a time."""

    def __init__(self, spark: SparkSession, lake: Lake, name: str) -> None:
        self._spark = spark
        self._lake = lake
        self._name = name
        self._checkpoint = lake.checkpoint(name)
        self._progress = ArchiveProgress()
        self._failure: Exception | None = None

    def run(
        self,
        options: Mapping[str, str],
        until_caught_up: bool,
        seconds: float,
        on_progress: Callable[[ArchiveProgress], None],
        stop: threading.Event,
    ) -> ArchiveProgress:
        spark = self._spark
        spark.dataSource.register(ArchiveDataSource)
        own = {
            LAKE: str(self._lake.root),
            PIPELINE: self._name,
            PARALLELISM: str(spark.sparkContext.defaultParallelism),
        }
        files = spark.readStream.format(FORMAT).options(**options, **own).load()
        writer = files.writeStream.queryName(f"archive {self._lake.root.name} {self._name}").foreachBatch(self._commit)
        writer = writer.option("checkpointLocation", str(self._checkpoint))
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{max(1, round(seconds * 1000))} milliseconds")
        query = writer.start()
        try:
            self._watch(query, on_progress, stop)
        except Exception:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            query.stop()  # a batch under way is run again next time
        self._lake.settle()
        return self._progress

    def _watch(
        self, query: StreamingQuery, on_progress: Callable[[ArchiveProgress], None], stop: threading.Event
    ) -> None:
        is_ended = False
        while not is_ended and not stop.is_set():
            is_ended = bool(query.awaitTermination(_POLL_SECONDS))
            self._progress.behind = _behind(query.lastProgress)
            on_progress(self._progress)

    def _commit(self, rows: DataFrame, batch: int) -> None:
        try:
            written = [file_of(row["file"]) for row in rows.collect()]
            if not self._lake.commit_batch(self._query_id(), batch, written):
                return
            self._lake.settle()
        except Exception as error:  # told to the thread that waits; Spark would tell it only that there was one
            self._failure = error
            raise
        self._progress.batches += 1
        self._progress.messages += sum(file.rows for file in written)
        self._progress.files += len(written)
        self._progress.bytes += sum(file.bytes for file in written)

    def _query_id(self) -> str:
        """Spark gives a checkpoint an id when it is made; batches are numbered under it."""
        found: dict[str, str] = json.loads((self._checkpoint / "metadata").read_text())
        return found["id"]


def _behind(progress: StreamingQueryProgress | None) -> int | None:
    """Messages between the end of the last batch and the end of the queues, as Spark last heard."""
    if progress is None:
        return None
    source = progress.sources[0]
    if "null" in (source.endOffset, source.latestOffset) or None in (source.endOffset, source.latestOffset):
        return None
    end, latest = (from_json(json.loads(text)) for text in (source.endOffset, source.latestOffset))
    return waiting(end, latest)
