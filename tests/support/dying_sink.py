"""A sink whose driver fails or is killed at a chosen point of a batch; also a driver of its own, to be killed.

python -m tests.support.dying_sink '{"namesrv": "…", "source": "…", "checkpoint": "…", "level": "…", "point": "…"}'
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceStreamWriter
from pyspark.sql.types import StructType

import downrange.spark
from downrange.client.producer.transaction_producer import LocalTransactionState
from downrange.spark.data_source import RocketMQDataSource
from downrange.spark.delivery import Marker, Step
from downrange.spark.half_message_lists import halves_of
from downrange.spark.half_sending import end_halves
from downrange.spark.sink import Delivery, StreamSink, TaskSent, stream_writer
from downrange.spark.sink_client import client_of

if TYPE_CHECKING:
    import pyarrow as pa

BEFORE_COMMIT: Final = "before commit"
AMID_END: Final = "amid END"
AFTER_DECIDE: Final = "after DECIDE"
AFTER_END: Final = "after END"
AFTER_CLOSE: Final = "after CLOSE"
TASK: Final = "in a task"

# Spark's workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]


class Broke(Exception):
    """What a driver that is not killed fails with."""


class DyingDelivery(Delivery):
    point: str
    kills: bool

    def send(self, batches: Iterator[pa.RecordBatch], partition: int) -> TaskSent:
        return super().send(_torn(batches) if self.point == TASK else batches, partition)

    def commit(self, tasks: Sequence[TaskSent]) -> None:
        self._reach(BEFORE_COMMIT)
        super().commit(tasks)

    def perform(self, step: Step, marker: Marker | None, tasks: Sequence[TaskSent]) -> Marker | None:
        if step is Step.END and self.point == AMID_END:
            client = self._client
            halves = halves_of(page for task in tasks for page in task.pages)
            client.run(end_halves(client.transactions, halves[: len(halves) // 2], LocalTransactionState.COMMIT))
            self._reach(AMID_END)
        found = super().perform(step, marker, tasks)
        self._reach(f"after {step.name}")
        return found

    def _reach(self, point: str) -> None:
        if point == self.point:
            if self.kills:
                kill_driver()
            raise Broke(point)


def _torn(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first attempt of a task fails when it has been given half of its rows."""
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    for batch in batches:
        if task.attemptNumber() == 0 and task.partitionId() == 0:
            yield batch.slice(0, batch.num_rows // 2)
            raise Broke(TASK)
        yield batch


class DyingStreamSink(StreamSink):
    point: str
    kills: bool

    def delivery(self, query: str, batch: int) -> Delivery:
        delivery = DyingDelivery(client_of(self._options), query, batch)
        delivery.point, delivery.kills = self.point, self.kills
        return delivery


def dying_source(name: str, point: str, *, kills: bool = False) -> type[RocketMQDataSource]:
    """The data source `rocketmq` under another name, with a sink that dies at `point`."""

    class Dying(RocketMQDataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
            sink = stream_writer(self.options, schema, overwrite)
            assert isinstance(sink, StreamSink)
            dying = DyingStreamSink(sink._options)
            dying.point, dying.kills = point, kills
            return dying

    return Dying


def kill_driver() -> None:
    """Kill the JVM this worker belongs to; everything else of the driver ends with it."""
    process = os.getpid()
    while (Path("/proc") / str(process) / "comm").read_text().strip() != "java":
        # The fields after the name in brackets: state, parent, …
        process = int((Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(process, signal.SIGKILL)
    os._exit(1)  # this process belongs to the dead as well


def write_stream(
    spark: SparkSession, sink: str, source: Path, checkpoint: Path, options: dict[str, str], *, files: int = 100
) -> None:
    """Write everything below `source` (Parquet, columns body and sharding_key) and return; raises what went wrong."""
    rows = spark.readStream.schema("body string, sharding_key string").option("maxFilesPerTrigger", files)
    query = (
        rows.parquet(str(source))
        .writeStream.format(sink)
        .options(**options)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def main() -> None:
    given = json.loads(sys.argv[1])
    spark = downrange.spark.session(
        master=given.get("master", "local[2]"),
        log_level="OFF",
        settings={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
    sink = "rocketmq"
    if point := given.get("point"):
        sink = "dying"
        spark.dataSource.register(dying_source(sink, point, kills=point != TASK))
    options = {"namesrv": given["namesrv"], "topic": given["topic"], "deliveryLevel": given["level"]}
    options["batchBytes"] = "1024"  # requests are small, so that a part of a task is sent when it fails
    with contextlib.suppress(KeyboardInterrupt):
        write_stream(spark, sink, Path(given["source"]), Path(given["checkpoint"]), options)
    spark.stop()


if __name__ == "__main__":
    main()
