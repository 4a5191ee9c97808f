"""Reading a topic into Spark: rows a second and a CPU second, over the wire and from store files, beside plain rows.

The plain source decodes record by record and yields tuples, as most Python sources do. CPU is that of the JVM and its
Python workers together; the broker runs in a process of its own and is not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

import downrange.spark
from bench.report import Figure, best_rate, cpu_seconds
from downrange import Message, Producer
from downrange.model.message import MessageQueue
from downrange.model.record import decode_record
from downrange.spark.decoder import Decoder
from downrange.spark.options import parse_options
from downrange.spark.planner import ranges
from downrange.spark.schema import message_schema
from downrange.spark.store_reader import StoreReader, Stores

FEW: Final = "topic string, queue_id int, queue_offset long, store_time timestamp, body binary"
SIZES: Final = {"100 B": (100, 200_000), "1 KiB": (1024, 50_000)}
_SERVER: Final = """
import sys
from pathlib import Path
from downrange.testing import broker
settings = {"mappedFileSizeCommitLog": str(1 << 30), "waitTimeMillsInSendQueue": "30000"}
with broker(settings, data=Path(sys.argv[1])) as mq:
    for topic in sys.argv[2:]:
        mq.create_topic(topic, 4)
    print(mq.namesrv, flush=True)
    sys.stdin.readline()
"""


class PlainReader(DataSourceReader):
    """Decodes one record at a time out of the mapped files."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = parse_options(options)

    def partitions(self) -> list[InputPartition]:
        stores = Stores(self._options)
        reach = stores.reach(stores.queues(), must_answer=True)
        start = {queue: there.minimum for queue, there in reach.items()}
        found = ranges(start, {queue: there.maximum for queue, there in reach.items()})
        return [InputPartition([one]) for one in found]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for fetched in StoreReader(self._options).read(partition.value):
            queue: MessageQueue = fetched.origin.queue
            for start in fetched.starts.tolist():
                message = decode_record(fetched.buffer, start)  # type: ignore[arg-type]
                yield (
                    queue.topic,
                    queue.broker_name,
                    message.queue_id,
                    message.queue_offset,
                    message.physical_offset,
                    message.offset_message_id,
                    message.unique_key,
                    " ".join(message.keys),
                    message.tags,
                    message.body,
                    _moment(message.born_timestamp),
                    _moment(message.store_timestamp),
                    str(message.born_host),
                    str(message.store_host),
                    message.reconsume_times,
                    message.sys_flag,
                )


def _moment(millis: int) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(millis / 1000, UTC)


class PlainSource(DataSource):
    """The rows that PlainReader makes."""

    @classmethod
    def name(cls) -> str:
        return "plain_rows"

    def schema(self) -> StructType:
        return message_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return PlainReader(dict(self.options))


@contextmanager
def filled_broker(data: Path) -> Iterator[str]:
    """A broker in a process of its own that holds the messages of SIZES."""
    topics = [f"size-{size}" for size, _ in SIZES.values()]
    command = [sys.executable, "-c", _SERVER, str(data), *topics]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        namesrv = process.stdout.readline().strip()
        with Producer("bench", namesrv) as producer:
            for size, count in SIZES.values():
                topic = f"size-{size}"
                for first in range(0, count, 1000):
                    producer.send_batch(
                        Message(topic, bytes(size), tags="paid", keys=f"order-{number}")
                        for number in range(first, first + 1000)
                    )
        yield namesrv
        process.stdin.close()
        process.wait(30)


def tree_cpu() -> float:
    """CPU seconds of our children and theirs: the JVM and its Python workers."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    total, waiting = 0.0, [pid for pid in children.get(os.getpid(), []) if _is_java(pid)]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        try:
            total += cpu_seconds(pid)
        except OSError:
            continue
    return total


def _is_java(pid: int) -> bool:
    return "java" in Path(f"/proc/{pid}/cmdline").read_text()


def _scan(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def measure(make: Callable[[], DataFrame], rows: int, rounds: int = 2) -> tuple[float, float]:
    """Rows a second of the best round, and rows a CPU second over all but the first."""
    _scan(make())
    best = 0.0
    cpu = tree_cpu()
    for _ in range(rounds):
        start = time.perf_counter()
        _scan(make())
        best = max(best, rows / (time.perf_counter() - start))
    return best, rounds * rows / max(0.01, tree_cpu() - cpu)


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="downrange-bench-") as directory, filled_broker(Path(directory)) as namesrv:
        store = str(Path(directory) / "store")
        yield from _decoder_alone(store)
        spark = downrange.spark.session("bench", master="local[2]", log_level="ERROR")
        spark.dataSource.register(PlainSource)
        for name, (size, rows) in SIZES.items():
            topic = f"size-{size}"
            reader = spark.read.format("plain_rows").options(storePath=store, subscribe=topic)
            plain, plain_cpu = measure(reader.load, rows, 1)
            yield Figure(f"plain rows from store files, {name}", plain, "rows/s")
            yield Figure(f"plain rows from store files, {name}, a CPU second", plain_cpu, "rows")
            for place, options in (("wire", {"namesrv": namesrv}), ("store files", {"storePath": store})):
                for columns, schema in (("16 columns", None), ("5 columns", FEW)):
                    rate, cpu = measure(partial(_frame, spark, topic, options, schema), rows)
                    yield Figure(f"{place}, {name}, {columns}", rate, "rows/s", rate / plain, "plain rows")
                    yield Figure(
                        f"{place}, {name}, {columns}, a CPU second", cpu, "rows", cpu / plain_cpu, "plain rows"
                    )
        yield from _empty_reads(spark, {"wire": {"namesrv": namesrv}, "store files": {"storePath": store}})
        yield _smallest_batch(spark, namesrv)
        spark.stop()


def _empty_reads(spark: SparkSession, places: dict[str, dict[str, str]]) -> Iterator[Figure]:
    """What a read takes that finds nothing: the part of the times above that does not grow with the rows."""
    for place, options in places.items():
        taken = []
        for _ in range(6):
            start = time.perf_counter()
            _scan(_frame(spark, "size-100", {**options, "startingOffsets": "latest"}, None))
            taken.append(1000 * (time.perf_counter() - start))
        yield Figure(f"{place}, no row at all", min(taken), "ms")


def _frame(spark: SparkSession, topic: str, options: dict[str, str], schema: str | None) -> DataFrame:
    reader = spark.read.format("rocketmq").options(subscribe=topic, minPartitions="4", **options)
    return (reader if schema is None else reader.schema(schema)).load()


def _decoder_alone(store: str) -> Iterator[Figure]:
    """One core, no Spark: records of the mapped files to Arrow."""
    options = parse_options({"storePath": store, "subscribe": "size-100"})
    stores = Stores(options)
    reach = stores.reach(stores.queues(), must_answer=True)
    wanted = ranges(dict.fromkeys(reach, 0), {queue: there.maximum for queue, there in reach.items()})
    full = to_arrow_schema(message_schema(include_properties=True), timezone="UTC")
    plain = full.remove(full.get_field_index("properties"))
    few = ["topic", "queue_id", "queue_offset", "store_time", "body"]
    schemas = {
        "17 columns with properties": full,
        "16 columns": plain,
        "5 columns": _only(full, few),
    }
    for name, schema in schemas.items():

        def decode(schema: Any = schema) -> int:
            decoder = Decoder(schema)
            reader = StoreReader(options)
            return sum(batch.num_rows for fetched in reader.read(wanted) for batch in decoder.batches(fetched))

        yield Figure(f"decoder alone, 100 B, {name}", best_rate(decode, 3), "rows/s")


def _only(schema: Any, names: list[str]) -> Any:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in names])


def _smallest_batch(spark: SparkSession, namesrv: str) -> Figure:
    """What a micro-batch of one message takes, from trigger to commit."""
    with tempfile.TemporaryDirectory(prefix="downrange-bench-") as checkpoint, Producer("bench", namesrv) as producer:
        producer.send(Message("single", b"first"))
        stream = spark.readStream.format("rocketmq").options(namesrv=namesrv, subscribe="single")
        writer = stream.load().writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.start()
        query.processAllAvailable()
        for _ in range(15):
            producer.send(Message("single", b"one"))
            query.processAllAvailable()
        taken = [batch["durationMs"]["triggerExecution"] for batch in query.recentProgress if batch["numInputRows"]]
        query.stop()
    return Figure("smallest micro-batch, median", statistics.median(taken[3:]), "ms")


if __name__ == "__main__":
    from bench.report import table

    for one in run():  # takes a minute or two: each figure as it comes
        print(table([one]).splitlines()[-1], flush=True)
