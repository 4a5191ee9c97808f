"""The archive: rows a second and a CPU second, beside Spark's own Parquet writer; and a message's way through Spark.

Both write all columns with properties, zstd, and end when they have caught up; the lake is also synced. CPU is that of
the JVM and its Python workers. Bodies are random hexadecimal digits, which compress to half.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

import downrange.spark
from bench.report import QUICK, Figure
from downrange import Message
from downrange.spark.pipelines.archive import archive
from downrange.testing import EmbeddedBroker, broker

SIZES: Final = {"100 B": (100, 60_000 if QUICK else 600_000), "1 KiB": (1024, 20_000 if QUICK else 200_000)}
ROUNDS: Final = 2
"""Of which the better counts: the first one also starts workers and compiles."""
WARM_UPS: Final = 5 if QUICK else 40
"""Messages before those that count: the first micro-batches of a query are slow, as Java compiles what they run."""
LATENCIES: Final = 20 if QUICK else 150
"""Messages of each of the two measurements."""
BETWEEN: Final = 5 if QUICK else 300
"""Messages between them: Java compiles for half a minute."""


def run() -> Iterator[Figure]:
    settings = {"mappedFileSizeCommitLog": str(1 << 30), "waitTimeMillsInSendQueue": "30000"}
    with tempfile.TemporaryDirectory(prefix="downrange-bench-") as directory:
        root = Path(directory)
        with broker(settings, data=root / "data") as mq:
            for size, count in SIZES.values():
                fill(mq, f"size-{size}", size, count)
            spark = downrange.spark.session("bench", master="local[2]", log_level="ERROR")
            for name, (size, count) in SIZES.items():
                yield from writers(spark, mq, root, f"size-{size}", name, count)
            yield from latency(spark, mq, root)
            spark.stop()


def fill(mq: EmbeddedBroker, topic: str, size: int, count: int) -> None:
    chance = random.Random(size)
    mq.create_topic(topic, 4)
    producer = mq.producer()
    for first in range(0, count, 500):
        producer.send_batch(
            Message(topic, chance.randbytes(size // 2).hex().encode(), tags=f"tag{number % 5}", keys=f"order-{number}")
            for number in range(first, first + 500)
        )


def writers(spark: SparkSession, mq: EmbeddedBroker, root: Path, topic: str, name: str, count: int) -> Iterator[Figure]:
    store = {"storePath": str(mq.data / "store"), "subscribe": topic}
    wire = {"namesrv": mq.namesrv, "subscribe": topic}
    works: dict[str, Callable[[Path], None]] = {
        "Spark's writer, store files": lambda out: spark_writer(spark, store, out, count),
        "archive, store files": lambda out: archived(spark, store, out, count),
        "archive, wire": lambda out: archived(spark, wire, out, count),
    }
    rounds = 1 if QUICK else ROUNDS
    rates, cpus = dict.fromkeys(works, 0.0), dict.fromkeys(works, 0.0)
    for number in range(rounds):
        for work_name, work in works.items():
            began, cpu = time.perf_counter(), tree_cpu()
            work(root / f"{topic}-{number}-{work_name.replace(' ', '-')}")
            rates[work_name] = max(rates[work_name], count / (time.perf_counter() - began))
            cpus[work_name] = max(cpus[work_name], count / max(0.01, tree_cpu() - cpu))
    base = next(iter(works))
    for work_name in works:
        yield Figure(f"{work_name}, {name}", rates[work_name], "rows/s", rates[work_name] / rates[base], base)
        yield Figure(f"{work_name}, {name}, a CPU second", cpus[work_name], "rows", cpus[work_name] / cpus[base], base)


def tree_cpu() -> float:
    """CPU seconds of the JVM and its Python workers, also of those that have ended."""
    ticks, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # its own, and those of children it has waited for
    total = 0
    for process, used in ticks.items():
        ancestor = process
        while (ancestor := parents.get(ancestor, 0)) > 1:
            if ancestor == os.getpid():
                total += used
                break
    return total / os.sysconf("SC_CLK_TCK")


def archived(spark: SparkSession, options: dict[str, str], out: Path, count: int) -> None:
    done = archive(spark, out, options)
    assert done.messages == count, done


def spark_writer(spark: SparkSession, options: dict[str, str], out: Path, count: int) -> None:
    stream = spark.readStream.format("rocketmq").options(
        **options,
        startingOffsets="earliest",
        includeProperties="true",
        minPartitions="2",
        maxRecordsPerPartition="1000000",
    )
    writer = stream.load().writeStream.format("parquet").option("compression", "zstd").partitionBy("topic")
    query = writer.option("checkpointLocation", f"{out}.checkpoint").trigger(availableNow=True).start(str(out))
    query.awaitTermination()
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == count


def latency(spark: SparkSession, mq: EmbeddedBroker, root: Path) -> Iterator[Figure]:
    """From the store time of a message in one topic to that of its copy in another, through a stream of Spark."""
    mq.create_topic("in", 1)
    mq.create_topic("out", 1)
    producer = mq.producer()
    source = spark.readStream.format("rocketmq").options(namesrv=mq.namesrv, subscribe="in", startingOffsets="earliest")
    copies = source.load().selectExpr("'out' AS topic", "body", "keys")
    query = (
        copies.writeStream.format("rocketmq")
        .options(namesrv=mq.namesrv, checkpointLocation=str(root / "latency"))
        .trigger(processingTime="0 seconds")
        .start()
    )
    for number in range(WARM_UPS):
        producer.send(Message("in", b"warm-up %d" % number, keys="warm-up"))
        mq.wait_for("out", number + 1, 60)
    total = LATENCIES + BETWEEN + LATENCIES
    for number in range(total):
        producer.send(Message("in", b"%d" % number, keys=str(number)))
        time.sleep(0.05)
    mq.wait_for("out", WARM_UPS + total, 60)
    query.stop()
    sent, copied = (
        {message.body: message.store_timestamp for message in mq.messages(topic)} for topic in ("in", "out")
    )
    for name, first in (("after its start", 0), ("warm", total - LATENCIES)):
        bodies = [b"%d" % number for number in range(first, first + LATENCIES)]
        taken = sorted(copied[body] - sent[body] for body in bodies)
        for share in (50, 99):
            yield Figure(f"source to sink, {name}, p{share}", taken[len(taken) * share // 100], "ms")


if __name__ == "__main__":
    from bench.report import table

    print(table(run()))
