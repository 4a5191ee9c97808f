"""Rows per second from a DataFrame into a broker process, at each delivery level; and what a row costs a worker.

100-byte bodies, a tag and a key. *Worker* is the sink's own code in one process, without Spark: Arrow batches in,
acknowledged messages out, so its CPU for each row repeats well. *Spark* is `df.write` in `local[2]`, JVM included.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import pyarrow as pa

from bench.report import QUICK, Figure, table
from downrange.spark.delivery import Level
from downrange.spark.sink import Delivery
from downrange.spark.sink_client import client_of, close_clients
from downrange.spark.sink_options import sink_options
from tests.support.standalone_process import Standalone, standalone_process

BODY: Final = b"x" * 100
BATCH_ROWS: Final = 10_000
ROWS: Final = {
    Level.AT_LEAST_ONCE: 20_000 if QUICK else 400_000,
    Level.IDEMPOTENT: 20_000 if QUICK else 400_000,
    Level.TRANSACTIONAL: 10_000 if QUICK else 60_000,
}
ROUNDS: Final = 1 if QUICK else 3


def rows_of_a_batch() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "body": [BODY] * BATCH_ROWS,
            "tags": ["paid"] * BATCH_ROWS,
            "keys": [f"order-{number}" for number in range(BATCH_ROWS)],
        }
    )


def worker(cluster: Standalone, level: Level) -> list[Figure]:
    options = {"namesrv": cluster.namesrv, "topic": "BenchmarkTest", "deliveryLevel": level.value}
    client = client_of(sink_options(options))
    batch = rows_of_a_batch()
    rate, cpu_rate = 0.0, 0.0
    for number in range(ROUNDS + 1):  # the first finds routes and connects
        rows = BATCH_ROWS if number == 0 else ROWS[level]
        delivery = Delivery(client, f"bench-{level}", number)
        started, cpu = time.perf_counter(), time.process_time()
        delivery.commit([delivery.send(iter([batch] * (rows // BATCH_ROWS)), partition=0)])
        if number:
            rate = max(rate, rows / (time.perf_counter() - started))
            cpu_rate = max(cpu_rate, rows / (time.process_time() - cpu))
    close_clients()
    return [
        Figure(f"worker, {level}", rate, "rows/s"),
        Figure(f"worker, {level}: per second of its CPU", cpu_rate, "rows/CPU s"),
    ]


def through_spark(cluster: Standalone) -> list[Figure]:
    import downrange.spark

    spark = downrange.spark.session("bench", master="local[2]", log_level="ERROR")
    figures = []
    for level, rows in ROWS.items():
        frame = spark.range(0, rows, 1, 2).selectExpr(
            "repeat('x', 100) as body", "'paid' as tags", "concat('order-', id) as keys"
        )
        best = 0.0
        for number in range(ROUNDS):
            started = time.perf_counter()
            options = {"namesrv": cluster.namesrv, "topic": "BenchmarkTest", "writeId": f"{level}-{number}"}
            frame.write.format("rocketmq").mode("append").option("deliveryLevel", level).options(**options).save()
            best = max(best, rows / (time.perf_counter() - started))
        figures.append(Figure(f"Spark, {level}", best, "rows/s"))
    spark.stop()
    return figures


def run() -> list[Figure]:
    # A busy machine must not turn into flow control: the broker may let requests wait.
    patient = {"waitTimeMillsInSendQueue": 10_000}
    with (
        tempfile.TemporaryDirectory() as directory,
        standalone_process(Path(directory), patient, log_level="ERROR") as cluster,
    ):
        figures = [figure for level in Level for figure in worker(cluster, level)]
        return [*figures, *through_spark(cluster)]


if __name__ == "__main__":
    print(table(run()))
