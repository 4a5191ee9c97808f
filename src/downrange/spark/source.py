"""The readers of topics, which Spark calls: they use the planner, a cluster or a store, and a decoder.

    spark = downrange.spark.session()
    orders = (
        spark.read.format("rocketmq")                      # spark.readStream for a stream
        .option("namesrv", "127.0.0.1:9876")
        .option("subscribe", "orders")
        .schema("topic string, queue_offset long, body binary")   # optional: fewer columns, less work
        .load()
    )

Columns are those of schema.py; `includeProperties` adds the map `properties`. All options are in
docs/reference/spark-options.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import parse_tags
from downrange.spark import planner
from downrange.spark.cluster import Cluster
from downrange.spark.decoder import Decoder
from downrange.spark.errors import DataLost, NothingToRead, OptionError, one_line_errors
from downrange.spark.filters import Narrowed
from downrange.spark.frozen_imports import freeze_imports
from downrange.spark.offset_resolution import Origins, resolve
from downrange.spark.offsets import Offsets, from_json, to_json
from downrange.spark.options import EARLIEST, LATEST, SourceOptions
from downrange.spark.planner import Loss, QueueRange, Reach
from downrange.spark.store_reader import StoreReader, Stores
from downrange.spark.wire_reader import WireReader
from downrange.spark.worker_loop import worker_loop

log = logging.getLogger(__name__)


@dataclass
class Task(InputPartition):
    """The ranges that one task reads; sent to a worker."""

    ranges: tuple[QueueRange, ...]
    tags: frozenset[str] = frozenset()
    store_time: range | None = None
    bulk_brokers: frozenset[str] = frozenset()
    """The names of brokers that take bulk pulls."""


class _Reading:
    """The common part of reads and streams. Spark pickles it, so it has no open files or connections."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema

    def _origins(self) -> Origins:
        if self._options.store_path is not None:
            return Stores(self._options)
        return Cluster(self._options, worker_loop())

    def _existing(self, origins: Origins) -> dict[MessageQueue, Reach]:
        """The queues at the start; raises an error when there are none, or when a named one is missing."""
        queues = origins.queues()
        topics = {queue.topic for queue in queues}
        missing = [topic for topic in (*self._options.topics, *self._options.assigned) if topic not in topics]
        if missing:
            addresses = ";".join(self._options.client_config().namesrv_addresses)
            where = self._options.store_path or f"name server {addresses}"
            raise NothingToRead(f"no topic {', '.join(missing)} that may be read, says {where}")
        if not queues and self._options.subscribe_pattern is None:
            raise NothingToRead("none of the queues named by assign exists")
        if isinstance(origins, Cluster):
            origins.check_filter(queues)
        return origins.reach(queues, must_answer=True)

    def _tasks(self, ranges: Sequence[QueueRange]) -> list[Task]:
        options = self._options
        if options.whole_queues:
            found = planner.whole_queue_tasks(ranges, options.min_partitions or 1)
        else:
            found = planner.tasks(ranges, most=options.max_records_per_partition, at_least=options.min_partitions)
        return [Task(part, parse_tags(options.tags)) for part in found]

    def _with_bulk_pulls(self, tasks: Sequence[Task], origins: Origins) -> list[Task]:
        if not tasks or not isinstance(origins, Cluster):
            return list(tasks)
        bulk = origins.bulk_brokers({one.queue for task in tasks for one in task.ranges})
        return [replace(task, bulk_brokers=bulk) for task in tasks]

    def _lost(self, losses: Sequence[Loss]) -> None:
        for loss in losses:
            if self._options.fail_on_data_loss:
                raise DataLost(f"{loss} (failOnDataLoss=false would go on without them)")
            log.warning("messages lost %s", loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs on a worker: the batches of one task."""
        if not isinstance(partition, Task):  # Spark passes something else if there is nothing to read
            return
        freeze_imports()
        options = self._options
        decoder = Decoder(
            self._schema,
            tags=partition.tags,
            store_time=partition.store_time,
            max_body_bytes=options.max_body_bytes,
            check_crc=options.check_crc,
        )
        with one_line_errors():
            reader = (
                StoreReader(options)
                if options.store_path is not None
                else WireReader(options, worker_loop(), partition.bulk_brokers)
            )
            for fetched in reader.read(partition.ranges):
                yield from decoder.batches(fetched)


def check_source(options: SourceOptions) -> None:
    """Raise the error with which a read would begin: nobody answers, a topic is missing, a filter is wrong.

    Spark need not run for that.
    """
    reading = _Reading(options, pa.schema([]))
    reading._existing(reading._origins())


class BatchReader(_Reading, DataSourceReader):
    """The reader of `spark.read`: messages between starting and ending offsets, fixed when the query is planned."""

    _narrowed = Narrowed()

    def partitions(self) -> Sequence[InputPartition]:
        with one_line_errors():
            return self._planned()

    def _planned(self) -> list[InputPartition]:
        options, narrowed = self._options, self._narrowed
        origins = self._origins()
        reach = {queue: there for queue, there in self._existing(origins).items() if narrowed.has_queue(queue)}
        start = resolve("starting", options.starting, EARLIEST, reach, origins)
        end = resolve("ending", options.ending, LATEST, reach, origins)
        self._lost(planner.losses(start, reach))
        inside = {
            queue: min(max(offset, reach[queue].minimum), reach[queue].maximum) for queue, offset in start.items()
        }
        end = {queue: min(offset, reach[queue].maximum) for queue, offset in end.items()}
        if narrowed.store_time is not None:
            first, last = narrowed.store_time.start, narrowed.store_time.stop
            inside = _furthest(inside, origins.at_time(dict.fromkeys(reach, first), reach), max)
            end = _furthest(end, origins.at_time(dict.fromkeys(reach, last), reach), min)
        wanted = [narrowed.within(one) for one in planner.ranges(inside, end)]
        tasks = self._with_bulk_pulls(self._tasks([one for one in wanted if one.size > 0]), origins)
        return [replace(task, tags=narrowed.tags_of(task.tags), store_time=narrowed.store_time) for task in tasks]


def _furthest(one: Offsets, other: Offsets, choose: Any) -> Offsets:
    return {queue: choose(offset, other[queue]) for queue, offset in one.items()}


class FilteringBatchReader(BatchReader):
    """A BatchReader that uses the filters of the query to read less. Spark checks every row again.

    It is a separate class because Spark refuses readers with `pushFilters` while its own setting is off.
    """

    def pushFilters(self, filters: list[Any]) -> Any:  # noqa: N802  Spark's name
        with one_line_errors():
            self._narrowed = Narrowed.by(filters)
        return filters  # Spark must apply all of them: we only leave out rows that cannot match


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of `spark.readStream`. Lives in one Python process of the driver; `read` runs on copies in workers.

    Holds always: `latestOffset` never goes beyond the ends that AvailableNow saw when it began, and no queue goes back,
    except one that was created again.
    """

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        super().__init__(options, schema)
        if options.ending.is_given:
            raise OptionError("a stream has no end: endingOffsets and endingTimestamp are for spark.read")
        self._target: Offsets | None = None
        self._latest: Offsets | None = None
        self._committed: Offsets = {}
        self._last_trigger: float | None = None
        self._opened: Origins | None = None
        self._is_checked = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def _source(self) -> Origins:
        if self._opened is None:
            self._opened = self._origins()
        return self._opened

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        with one_line_errors():
            reach = self._existing(self._source)
            self._is_checked = True
            start = resolve("starting", self._options.starting, LATEST, reach, self._source)
            self._lost(planner.losses(start, reach))
            for queue, offset in start.items():
                start[queue] = reach[queue].nearest(offset)
            return to_json(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        most = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with one_line_errors():
            reach = self._existing(self._source)
            self._is_checked = True
            self._target = {queue: there.maximum for queue, there in reach.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        with one_line_errors():
            begin = from_json(start)
            self._commit(begin)
            reach = self._reach()
            self._lost(planner.losses(begin, reach))
            # A queue may have lost its oldest messages; then the batch begins behind them, and `losses` reports them.
            end = planner.latest(begin, reach)
            self._latest = end
            if self._target is not None:
                end = {**begin, **planner.capped(end, self._target)}
            if not self._is_due(begin, end):
                return start
            if isinstance(limit, ReadMaxRows):
                minima = {queue: there.minimum for queue, there in reach.items()}
                end = planner.limited(begin, end, limit.max_rows, minima)
            return to_json(end)

    def _reach(self) -> dict[MessageQueue, Reach]:
        if not self._is_checked:  # restarted from a checkpoint: check as at a first start
            self._is_checked = True
            return self._existing(self._source)
        return self._source.reach(self._source.queues(), must_answer=False)

    def _is_due(self, begin: Offsets, end: Offsets) -> bool:
        """Whether there are minOffsetsPerTrigger messages, or the wait for them was long enough."""
        least = self._options.min_offsets_per_trigger
        if least is None or self._target is not None:
            return True
        now = time.monotonic()
        if self._last_trigger is None:
            self._last_trigger = now
        there = planner.waiting(begin, end)
        is_late = now - self._last_trigger >= self._options.trigger_delay_seconds
        if there >= least or (there and is_late):
            self._last_trigger = now
            return True
        return False

    def _commit(self, done: Offsets) -> None:
        """Commit offsets from which Spark continues, which means that their batch was written."""
        if self._options.commit_group_offsets and done != self._committed:
            self._source.commit(
                {queue: offset for queue, offset in done.items() if self._committed.get(queue) != offset}
            )
            self._committed = done

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._latest is None else to_json(self._latest)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with one_line_errors():
            tasks = self._tasks(planner.ranges(from_json(start), from_json(end)))
            return self._with_bulk_pulls(tasks, self._source)


class BrokenStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stands for a stream with wrong options, and raises their error at the first call of Spark.

    An error raised while a reader is made never reaches the user: Spark 4 fails to clean up and reports that instead.
    """

    def __init__(self, error: MQError) -> None:
        self._error = error

    def _tell(self, *_: Any, **__: Any) -> NoReturn:
        with one_line_errors():
            raise self._error

    initialOffset = latestOffset = prepareForTriggerAvailableNow = partitions = read = _tell  # noqa: N815  Spark's names
