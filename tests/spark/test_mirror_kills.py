"""The promise of a mirror: its driver is killed again and again, and every message arrives, in order, once."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.spark.pipelines.mirror import mirror
from downrange.spark.pipelines.mirror_clusters import Mirror
from downrange.testing import EmbeddedBroker, broker
from tests.support.processes import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def sending(mq: EmbeddedBroker) -> Iterator[None]:
    """Messages with sharding keys go out all the time, some alone and some in batches."""
    stop = Event()

    def send() -> None:
        producer = mq.producer()
        number = 0
        while not stop.wait(0.01):
            number += 20
            for one in range(number - 20, number - 10):
                producer.send(Message("orders", b"%d" % one, sharding_key=f"k{one % 5}"))
            producer.send_batch([Message("orders", b"%d" % one) for one in range(number - 10, number)])

    thread = Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def driver(wanted: Mirror) -> Running:
    return Running(
        *("pipeline", "mirror", "orders", "--from", wanted.source["namesrv"], "--to", wanted.target["namesrv"]),
        *("--from-cluster", "east", "--to-cluster", "west", "--checkpoint", wanted.checkpoint),
        *("--continuous", "--every", "0.05", "--batch", "400", "--master", "local[2]"),
    )


async def mirrored(process: Running, least: int, seconds: float = 120) -> None:
    """Wait until the driver says that it has mirrored so many."""
    async with asyncio.timeout(seconds):
        while True:
            counts = re.findall(r"mirrored ([\d,]+) messages", process.errors)
            if counts and int(counts[-1].replace(",", "")) >= least:
                return
            await asyncio.sleep(0.02)


async def test_a_driver_that_is_killed_again_and_again(spark: SparkSession, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with broker() as east, broker() as west:
        east.create_topic("orders", 4)
        wanted = Mirror(
            {"namesrv": east.namesrv, "subscribe": "orders"},
            {"namesrv": west.namesrv},
            str(tmp_path / "checkpoint"),
            source_cluster="east",
            target_cluster="west",
        )
        with sending(east):
            for _ in range(3):
                process = driver(wanted)
                try:
                    await mirrored(process, 1)
                    await asyncio.sleep(chance.random() * 2)
                    await asyncio.to_thread(process.kill)
                finally:
                    process.close()
        mirror(spark, wanted)
        here = {queue: bodies(east, queue) for queue in range(4)}
        there = {queue: bodies(west, queue) for queue in range(4)}
    assert sum(map(len, here.values())) > 1000
    assert there == here


def bodies(mq: EmbeddedBroker, queue_id: int) -> list[bytes]:
    found = [message for message in mq.messages("orders") if message.queue_id == queue_id]
    return [message.body for message in sorted(found, key=lambda message: message.queue_offset)]
