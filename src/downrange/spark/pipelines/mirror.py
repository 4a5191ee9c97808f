"""Mirrors topics of one cluster to another, as a streaming query from our source to our sink.

A message keeps its id, keys, tag, properties, sharding key and time of birth, and its queue keeps its order:
spark/mirror_rows.py says where it goes, spark/mirror_sending.py what is sent after a crash. Beside the query, the
driver creates topics at the target and carries over the offsets of groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from downrange.client.config import ClientConfig
from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.spark.mirror_rows import COLUMNS, MIRROR_PATH
from downrange.spark.pipelines.errors import told_in_one_line
from downrange.spark.pipelines.frames import place, topic_frame
from downrange.spark.pipelines.mirror_clusters import Clusters, Mirror, TopicPlan, checked, source_options
from downrange.spark.pipelines.mirror_groups import GroupPlace
from downrange.spark.progress import lag_of, status_of

KIND: Final = "mirror"
GROUP_SECONDS: Final = 5.0


@dataclass(slots=True)
class MirrorProgress:
    """The progress of a run. `behind` is the number of messages not read yet by topic; None: not known yet."""

    batches: int = 0
    read: int = 0
    mirrored: int = 0
    """Messages that were sent, or had been sent by a run that died; the others of `read` were cut as loops."""
    bytes: int = 0
    """Of the bodies of these."""
    group_queues: int = 0
    """How many times the offset of a group in a queue was moved at the target."""
    lag: dict[str, int] | None = None

    @property
    def behind(self) -> int | None:
        return None if self.lag is None else sum(self.lag.values())


@dataclass(frozen=True, slots=True)
class MirrorPlan:
    """What a mirror would do; `path` are the names of source and target."""

    path: tuple[str, str]
    topics: list[TopicPlan]
    groups: list[GroupPlace] = field(default_factory=list)


def mirror(
    spark: SparkSession,
    wanted: Mirror,
    *,
    until_caught_up: bool = True,
    seconds_between_batches: float = 1.0,
    on_progress: Callable[[MirrorProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> MirrorProgress:
    """Mirror topics. Returns when caught up, or when `stop` is set; started again, it continues where it was."""
    checked(wanted, seconds_between_batches)
    with told_in_one_line(), Clusters(wanted) as clusters:
        run = _Run(spark, wanted, clusters)
        run.run(None if until_caught_up else seconds_between_batches, on_progress or (lambda _: None), stop)
        return run.progress


def plan(wanted: Mirror) -> MirrorPlan:
    """A dry run: what a mirror would do. Nothing is sent, created or committed, and Spark is not needed."""
    checked(wanted)
    with told_in_one_line(), Clusters(wanted) as clusters:
        path = (clusters.sides.queues.source, clusters.sides.target_name)
        return MirrorPlan(path, clusters.planned(), clusters.group_places())


def messages_to_mirror(spark: SparkSession, source: Mapping[str, str], target: str) -> DataFrame:
    """The stream of messages that have not been in the cluster `target`."""
    frame = topic_frame(spark, source, COLUMNS, streaming=True)
    was_there = F.array_contains(F.split(F.coalesce(F.col("properties")[MIRROR_PATH], F.lit("")), ","), target)
    return frame.where(~was_there)


class _Run:
    """One mirror from start to end, in one thread."""

    def __init__(self, spark: SparkSession, wanted: Mirror, clusters: Clusters) -> None:
        self._spark = spark
        self._wanted = wanted
        self._clusters = clusters
        self._seen = -1
        self._status = PipelineStatus(wanted.name, KIND, wanted.topics_text, clusters.sides.target_name)
        self.progress = MirrorProgress()

    def run(
        self, seconds: float | None, on_progress: Callable[[MirrorProgress], None], stop: threading.Event | None
    ) -> None:
        stop = stop or threading.Event()
        self._clusters.create_topics()
        with _reporters(self._clusters.configs) as reporters:
            query = self._start(seconds)
            due = 0.0
            try:
                while not stop.is_set() and not _has_ended(query):
                    self._look_at(query, reporters)
                    on_progress(self.progress)
                    if time.monotonic() >= due:
                        self._clusters.create_topics()
                        self.progress.group_queues += self._clusters.carry_over_groups()
                        due = time.monotonic() + GROUP_SECONDS
            except Exception as error:
                for reporter in reporters:
                    reporter.tell_error(self._status, error)
                raise
            finally:
                query.stop()
            self._look_at(query, reporters)
        self.progress.group_queues += self._clusters.carry_over_groups()
        on_progress(self.progress)

    def _start(self, seconds: float | None) -> StreamingQuery:
        wanted, sides = self._wanted, self._clusters.sides
        source = source_options(wanted, self._spark.sparkContext.defaultParallelism)
        frame = messages_to_mirror(self._spark, source, sides.target_name)
        writer = (
            frame.observe(KIND, F.count("*").alias("mirrored"), F.sum(F.octet_length("body")).alias("bytes"))
            .writeStream.format("rocketmq")
            .queryName(wanted.name)
            .options(**{"producerGroup": wanted.group, **wanted.target, "mirror": sides.queues.text()})
            .option("checkpointLocation", place(wanted.checkpoint))
        )
        if seconds is None:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{round(seconds * 1000)} milliseconds").start()

    def _look_at(self, query: StreamingQuery, reporters: list[PipelineReporter]) -> None:
        """Count the batches that ended since the last look, and tell both clusters."""
        last: Any = None
        for last in query.recentProgress:
            if last.batchId > self._seen and last.numInputRows:
                self._seen = last.batchId
                self.progress.batches += 1
                self.progress.read += last.numInputRows
                self.progress.mirrored += last.observedMetrics[KIND]["mirrored"]
                self.progress.bytes += last.observedMetrics[KIND]["bytes"] or 0
        if last is None:
            return
        lag = lag_of(last)
        status = status_of(last, lag)
        if lag is not None:
            self.progress.lag = dict(status.lag)
        sent = (last.observedMetrics[KIND]["bytes"] or 0) if KIND in last.observedMetrics else 0
        self._status = replace(
            self._status,
            lag=status.lag,
            rows_per_second=status.rows_per_second,
            bytes_per_second=sent / status.batch_seconds if status.batch_seconds else None,
            batch_seconds=status.batch_seconds,
        )
        for reporter in reporters:
            reporter.tell(self._status)


def _has_ended(query: StreamingQuery) -> bool:
    """Wait a moment for the end of a query; raises its error in one line."""
    with told_in_one_line():
        return bool(query.awaitTermination(1))


@contextmanager
def _reporters(configs: tuple[ClientConfig, ClientConfig]) -> Iterator[list[PipelineReporter]]:
    found = [PipelineReporter(config) for config in configs]
    try:
        yield found
    finally:
        for one in found:
            one.close()
