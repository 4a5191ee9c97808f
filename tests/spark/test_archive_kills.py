"""The archive's promise: drivers and brokers are killed, and every acknowledged message is in the lake once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import AsyncProducer, Message, ProducerConfig
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.errors import MQError
from downrange.model.topics import TopicConfig
from downrange.spark.lake.check import problems
from downrange.spark.pipelines.archive import archive
from tests.support.object_store import LakePlace
from tests.support.process_cluster import ProcessCluster, process_cluster
from tests.support.processes import Running


@asynccontextmanager
async def sending(cluster: ProcessCluster, acknowledged: set[str]) -> AsyncIterator[None]:
    """Messages go out all the time; what a broker acknowledged is remembered."""

    async def send(producer: AsyncProducer) -> None:
        number = 0
        while True:
            number += 1
            with contextlib.suppress(MQError):  # a broker is away: not acknowledged, not promised
                acknowledged.add((await producer.send(Message("orders", b"order %d" % number))).message_id)
            await asyncio.sleep(0.02)

    config = ProducerConfig(fault_strategy="adaptive", attempt_timeout_seconds=0.5)
    async with AsyncProducer("kills", cluster.namesrv, config) as producer:
        tasks = [asyncio.create_task(send(producer)) for _ in range(4)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def cluster_with_orders(directory: Path) -> AsyncIterator[ProcessCluster]:
    async with process_cluster(directory, brokers=2, namesrvs=1) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            await admin.topics.create(TopicConfig("orders", 3, 3), cluster="DefaultCluster")
        yield cluster


def driver(cluster: ProcessCluster, place: LakePlace) -> Running:
    """It finds an object store by its environment, as its workers do."""
    return Running(
        *("pipeline", "archive", place.url, "orders", "-n", cluster.namesrv, "--master", "local[2]"),
        *("--continuous", "--every", "0.1", "-o", "maxOffsetsPerTrigger=500"),
        env=place.options,
    )


async def archived(process: Running, least: int, seconds: float = 90) -> None:
    """Wait until the driver says it has archived so many."""
    async with asyncio.timeout(seconds):
        while True:
            counts = [int(text.replace(",", "")) for text in re.findall(r"archived ([\d,]+) messages", process.errors)]
            if counts and counts[-1] >= least:
                return
            await asyncio.sleep(0.05)


async def more(acknowledged: set[str], count: int) -> None:
    wanted = len(acknowledged) + count
    async with asyncio.timeout(60):
        while len(acknowledged) < wanted:
            await asyncio.sleep(0.01)


def assert_everything_once(place: LakePlace, acknowledged: set[str]) -> None:
    table = place.open().dataset().to_table(["unique_key", "broker", "queue_id", "queue_offset"])
    assert acknowledged - set(table["unique_key"].to_pylist()) == set()
    # A broker may have stored what it had no time to acknowledge, and the producer then sent it again. Those are two
    # messages; but no place in a queue is there twice.
    places = Counter(zip(*(column.to_pylist() for column in table.columns[1:]), strict=True))
    assert max(places.values()) == 1
    assert list(problems(place.open())) == []


async def test_a_killed_driver_and_a_killed_broker(spark: SparkSession, tmp_path: Path, place: LakePlace) -> None:
    acknowledged: set[str] = set()
    async with cluster_with_orders(tmp_path) as cluster:
        async with sending(cluster, acknowledged):
            first = driver(cluster, place)
            try:
                await archived(first, 500)
                await cluster.brokers[0].kill()  # while the driver reads from it
                await more(acknowledged, 200)  # by the other broker
                await asyncio.to_thread(first.kill)
            finally:
                first.close()
            await cluster.brokers[0].start()
        options = {"namesrv": cluster.namesrv, "subscribe": "orders"}
        await asyncio.to_thread(archive, spark, place.url, options, storage_options=place.options)
    assert len(acknowledged) > 700
    assert_everything_once(place, acknowledged)


@pytest.mark.slow
async def test_many_kills_at_any_moment(spark: SparkSession, tmp_path: Path, place: LakePlace) -> None:
    acknowledged: set[str] = set()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with cluster_with_orders(tmp_path) as cluster:
        async with sending(cluster, acknowledged):
            for _ in range(6):
                process = driver(cluster, place)
                try:
                    await archived(process, 1)
                    victim = chance.choice(cluster.brokers)
                    await asyncio.sleep(chance.random())
                    await victim.kill()
                    await asyncio.sleep(chance.random())
                    await asyncio.to_thread(process.kill)
                finally:
                    process.close()
                await victim.start()
            last = driver(cluster, place)
            try:
                await archived(last, 1)
                assert await asyncio.to_thread(last.stop) == 0  # SIGTERM ends it in order
                assert re.search(r"archived [\d,]+ messages into", "\n".join(last.output))
            finally:
                last.close()
        options = {"namesrv": cluster.namesrv, "subscribe": "orders"}
        await asyncio.to_thread(archive, spark, place.url, options, storage_options=place.options)
    assert_everything_once(place, acknowledged)
