"""`spark.readStream.format("rocketmq")`: batches, restarts, growing topics, lost data. No test waits for a clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from downrange import Message
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.spark.progress import lag_of
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import numbers, send

SLOW = pytest.mark.slow
"""Another form of a test that runs always."""


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 4)
        yield running


class Batches:
    """A sink that keeps each batch under its number, so that a batch written again replaces itself."""

    def __init__(self, fail: Callable[[int, str], None] = lambda batch, phase: None) -> None:
        self.kept: dict[int, list[int]] = {}
        self.fail = fail

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.fail(number, "before")
        found = numbers(frame)
        self.fail(number, "read")
        self.kept[number] = found
        self.fail(number, "written")

    @property
    def all(self) -> list[int]:
        return sorted(number for batch in self.kept.values() for number in batch)


def stream(spark: SparkSession, namesrv: str, **options: object) -> DataFrame:
    given = {"subscribe": "orders", "startingOffsets": "earliest", **{k: str(v) for k, v in options.items()}}
    return spark.readStream.format("rocketmq").options(namesrv=namesrv, **given).load()


def drain(frame: DataFrame, checkpoint: Path, sink: Batches) -> StreamingQuery:
    """Run until everything that is there has been read."""
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def test_batches_are_limited_and_add_up(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "orders", range(100))
    sink = Batches()
    drain(stream(spark, mq.namesrv, maxOffsetsPerTrigger=30), tmp_path, sink)
    assert [len(batch) for batch in sink.kept.values()] == [30, 30, 30, 10]
    assert sink.all == list(range(100))


def test_a_restart_continues_where_the_last_run_ended(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    sink = Batches()
    for part in range(3):
        send(mq, "orders", range(part * 20, part * 20 + 20))
        drain(stream(spark, mq.namesrv), tmp_path, sink)
    assert sink.all == list(range(60))
    assert len(sink.kept) == 3


class Stop(Exception):
    """What a test raises inside a batch."""


@pytest.mark.parametrize("phase", [pytest.param("before", marks=SLOW), "read", pytest.param("written", marks=SLOW)])
def test_a_batch_that_failed_is_read_again_as_it_was(
    spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path, phase: str
) -> None:
    send(mq, "orders", range(40))

    def fail(number: int, at: str) -> None:
        if number == 1 and at == phase:
            raise Stop(phase)

    sink = Batches(fail)
    with pytest.raises(StreamingQueryException):
        drain(stream(spark, mq.namesrv, maxOffsetsPerTrigger=10), tmp_path, sink)
    planned = sorted(int(path.name) for path in (tmp_path / "offsets").iterdir() if path.name.isdecimal())
    assert planned == [0, 1], "the second batch was planned but not committed"
    send(mq, "orders", range(40, 60))  # what came since must not get into the batch that was planned before
    sink.fail = lambda number, at: None
    drain(stream(spark, mq.namesrv), tmp_path, sink)
    assert len(sink.kept[1]) == 10
    assert sink.all == list(range(60))


@pytest.mark.parametrize("lost", ["commits", pytest.param("offsets and commits", marks=SLOW)])
def test_a_crash_around_the_logs_of_spark(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path, lost: str) -> None:
    """As after kill -9: the entry of the last batch is missing in the commit log, or in both logs."""
    send(mq, "orders", range(30))
    sink = Batches()
    drain(stream(spark, mq.namesrv, maxOffsetsPerTrigger=10), tmp_path, sink)
    for log in lost.split(" and "):
        (tmp_path / log / "2").unlink()
        (tmp_path / log / ".2.crc").unlink(missing_ok=True)
    send(mq, "orders", range(30, 40))
    drain(stream(spark, mq.namesrv), tmp_path, sink)
    assert sink.all == list(range(40))


def test_a_stream_begins_at_the_end_unless_told_otherwise(
    spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path
) -> None:
    send(mq, "orders", range(10))
    sink = Batches()
    frame = spark.readStream.format("rocketmq").options(namesrv=mq.namesrv, subscribe="orders").load()
    drain(frame, tmp_path, sink)
    send(mq, "orders", range(10, 15))
    drain(frame, tmp_path, sink)
    assert sink.all == list(range(10, 15))


def test_queues_topics_and_brokers_that_appear_are_read(spark: SparkSession, tmp_path: Path) -> None:
    with broker() as mq:
        mq.create_topic("orders-eu", 1)
        send(mq, "orders-eu", range(10))
        sink = Batches()
        options = {"subscribePattern": "orders-.*", "startingOffsets": "earliest", "namesrv": mq.namesrv}
        writer = spark.readStream.format("rocketmq").options(**options).load().writeStream
        query = writer.foreachBatch(sink).option("checkpointLocation", str(tmp_path)).start()
        try:
            query.processAllAvailable()
            assert sink.all == list(range(10))
            mq.create_topic("orders-eu", 3)
            send(mq, "orders-eu", range(10, 30))
            mq.create_topic("orders-us", 2)
            send(mq, "orders-us", range(30, 40))
            with broker({"namesrvAddr": mq.namesrv, "brokerName": "broker-b"}) as other:
                other_namesrv_route_of(mq, other, "orders-us")
                query.processAllAvailable()
                assert sink.all == list(range(50))
                latest = query.lastProgress["sources"][0]["endOffset"]  # type: ignore[index]
                assert "broker-b" in json.dumps(latest)
            # The second broker is gone now: the stream goes on without it.
            send(mq, "orders-eu", range(50, 60))
            query.processAllAvailable()
            assert sink.all == list(range(60))
        finally:
            query.stop()


def other_namesrv_route_of(mq: EmbeddedBroker, other: EmbeddedBroker, topic: str) -> None:
    """Make a topic on a second broker and send 40 to 49 there."""
    import asyncio

    from downrange.model.message import MessageQueue
    from downrange.model.topics import TopicConfig

    async def create() -> None:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            (await admin.topics.create(TopicConfig(topic, 2, 2))).raise_if_none()

    asyncio.run(create())
    producer = mq.producer()
    for number in range(40, 50):
        producer.send(Message(topic, b"%d" % number), queue=MessageQueue(topic, "broker-b", number % 2))


def test_a_stream_says_how_far_behind_it_is(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "orders", range(50))
    query = drain(stream(spark, mq.namesrv, maxOffsetsPerTrigger=20), tmp_path, Batches())
    lags = [lag_of(progress) for progress in query.recentProgress]
    assert [lag.messages for lag in lags if lag is not None][:3] == [30, 10, 0]
    assert all(queue.topic == "orders" for lag in lags if lag is not None for queue in lag.by_queue)


def test_group_offsets_follow_the_stream(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    import asyncio

    send(mq, "orders", range(50))
    options = {"group": "lake", "commitGroupOffsets": True, "maxOffsetsPerTrigger": 20}
    drain(stream(spark, mq.namesrv, **options), tmp_path, Batches())

    async def progress() -> dict[str, Any]:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            (stats,) = (await admin.groups.progress("lake", "orders")).done.values()
            return {str(q.queue_id): (o.consumer_offset, o.broker_offset) for q, o in stats.offset_table.items()}

    table = asyncio.run(progress())
    assert len(table) == 4
    assert all(committed == end for committed, end in table.values()), table


def test_enough_messages_or_enough_time(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "orders", range(5))
    sink = Batches()
    frame = stream(spark, mq.namesrv, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    query = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "few")).start()
    try:
        query.processAllAvailable()
        assert sink.all == []
        send(mq, "orders", range(5, 10))
        query.processAllAvailable()
        assert sink.all == list(range(10))
    finally:
        query.stop()
    at_once = Batches()
    drain(stream(spark, mq.namesrv, minOffsetsPerTrigger=1000), tmp_path / "all", at_once)
    assert at_once.all == list(range(10)), "AvailableNow does not wait for more"


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_messages_deleted_before_they_were_read(spark: SparkSession, tmp_path: Path, small_files: Path) -> None:
    properties = {"mappedFileSizeCommitLog": str(1 << 20), "maxMessageSize": "200000"}
    sink = Batches()
    with broker(properties, data=small_files) as mq:
        mq.create_topic("orders", 1)
        send(mq, "orders", range(10))
        drain(stream(spark, mq.namesrv), tmp_path / "checkpoint", sink)
        send(mq, "orders", range(10, 4000), size=1000)
    files = sorted((small_files / "store" / "commitlog").iterdir())
    assert len(files) > 3
    for file in files[:2]:
        file.unlink()
    with broker(properties, data=small_files) as mq:
        left = sorted(int(message.body.rstrip(b".")) for message in mq.messages("orders"))
        assert left[0] > 10
        with pytest.raises(
            StreamingQueryException, match=r"orders on broker-a queue 0: messages 10 to \d+ were deleted"
        ):
            drain(stream(spark, mq.namesrv), tmp_path / "checkpoint", sink)
        drain(stream(spark, mq.namesrv, failOnDataLoss=False), tmp_path / "checkpoint", sink)
        assert sink.all == [*range(10), *left]


def test_a_topic_that_was_made_anew(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    import asyncio

    sink = Batches()
    mq.create_topic("one", 1)
    send(mq, "one", range(50))
    drain(stream(spark, mq.namesrv, subscribe="one"), tmp_path, sink)

    async def delete() -> None:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            await admin.topics.delete("one")

    asyncio.run(delete())
    mq.create_topic("one", 1)
    send(mq, "one", range(50, 60))
    with pytest.raises(StreamingQueryException, match=r"message 50 was to be read, but the queue ends at 10"):
        drain(stream(spark, mq.namesrv, subscribe="one"), tmp_path, sink)
    drain(stream(spark, mq.namesrv, subscribe="one", failOnDataLoss=False), tmp_path, sink)
    assert sink.all == list(range(60))
