"""`spark.read.format("rocketmq")` against a real broker: every option of a read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody calls it

from downrange import Message, ProducerConfig, SendStatus
from downrange.model.message import MessageQueue
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import bodies, checksum, numbers, send, source, wait_for_queue_files

TOPIC = "orders"
COUNT = 300


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    """A broker with COUNT messages in four queues of TOPIC."""
    with broker() as running:
        running.create_topic(TOPIC, 4)
        send(running, TOPIC, range(COUNT))
        yield running


def test_every_column_is_what_the_broker_has(spark: SparkSession, mq: EmbeddedBroker) -> None:
    rows = {row.queue_id * 10**6 + row.queue_offset: row for row in
            source(spark, mq.namesrv, subscribe=TOPIC, includeProperties=True).collect()}  # fmt: skip
    stored = mq.messages(TOPIC)
    assert len(rows) == len(stored) == COUNT
    for message in stored:
        row = rows[message.queue.queue_id * 10**6 + message.queue_offset]
        assert (row.topic, row.broker, row.queue_id) == message.queue
        assert row.physical_offset == message.physical_offset
        assert row.msg_id == message.offset_message_id
        assert row.unique_key == message.properties["UNIQ_KEY"]
        assert (row["keys"], row.tags) == (message.properties["KEYS"], message.tags)
        assert bytes(row.body) == message.body
        assert round(row.born_time.timestamp() * 1000) == message.born_timestamp
        assert round(row.store_time.timestamp() * 1000) == message.store_timestamp
        assert row.born_host == str(message.born_host)
        assert row.store_host == str(message.store_host)
        assert (row.reconsume_times, row.sys_flag) == (message.reconsume_times, message.sys_flag)
        added_by_the_client = ("MIN_OFFSET", "MAX_OFFSET")
        assert row.properties == {k: v for k, v in message.properties.items() if k not in added_by_the_client}


def test_a_schema_selects_columns(spark: SparkSession, mq: EmbeddedBroker) -> None:
    reader = spark.read.format("rocketmq").options(namesrv=mq.namesrv, subscribe=TOPIC)
    frame = reader.schema("tags string, queue_offset long").load()
    assert frame.columns == ["tags", "queue_offset"]
    assert frame.groupBy("tags").count().orderBy("tags").collect() == [("a", 100), ("b", 100), ("c", 100)]


def test_a_user_schema_may_ask_for_properties(spark: SparkSession, mq: EmbeddedBroker) -> None:
    reader = spark.read.format("rocketmq").options(namesrv=mq.namesrv, subscribe=TOPIC)
    frame = reader.schema("properties map<string,string>").load()
    assert frame.where("properties['parity'] = 'odd'").count() == COUNT // 2


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("tags", "a || c", [n for n in range(COUNT) if n % 3 != 1]),
        ("tags", "nobody", []),
        ("sqlFilter", "number BETWEEN 10 AND 20 AND parity = 'even'", list(range(10, 21, 2))),
        ("minPartitions", 7, list(range(COUNT))),
        ("maxRecordsPerPartition", 13, list(range(COUNT))),
        ("pullsInFlight", 1, list(range(COUNT))),
        ("checkCrc", True, list(range(COUNT))),
    ],
)
def test_an_option(spark: SparkSession, mq: EmbeddedBroker, option: str, value: object, wanted: list[int]) -> None:
    assert numbers(source(spark, mq.namesrv, subscribe=TOPIC, **{option: value})) == wanted


def test_partitions_follow_the_options(spark: SparkSession, mq: EmbeddedBroker) -> None:
    assert source(spark, mq.namesrv, subscribe=TOPIC).rdd.getNumPartitions() == 1
    assert source(spark, mq.namesrv, subscribe=TOPIC, minPartitions=6).rdd.getNumPartitions() == 6
    assert source(spark, mq.namesrv, subscribe=TOPIC, maxRecordsPerPartition=100).rdd.getNumPartitions() == 3


def test_starting_and_ending_offsets(spark: SparkSession, mq: EmbeddedBroker) -> None:
    start = json.dumps({TOPIC: {"broker-a": {"0": 1, "1": -1, "2": -2, "3": 2}}})
    end = json.dumps({TOPIC: {"broker-a": {"0": 2, "1": -1, "2": 1, "3": 2}}})
    frame = source(spark, mq.namesrv, subscribe=TOPIC, startingOffsets=start, endingOffsets=end)
    found = {(row.queue_id, row.queue_offset) for row in frame.collect()}
    assert found == {(0, 1), (2, 0)}
    assert source(spark, mq.namesrv, subscribe=TOPIC, startingOffsets="latest").count() == 0


def test_single_queues(spark: SparkSession, mq: EmbeddedBroker) -> None:
    frame = source(spark, mq.namesrv, assign=json.dumps({TOPIC: {"broker-a": [1, 3]}}))
    assert {row.queue_id for row in frame.select("queue_id").distinct().collect()} == {1, 3}
    assert frame.count() == sum(message.queue.queue_id in (1, 3) for message in mq.messages(TOPIC))


def test_times_are_exact(spark: SparkSession, mq: EmbeddedBroker) -> None:
    stored = mq.messages(TOPIC)
    times = sorted(message.store_timestamp for message in stored)
    first, last = times[5], times[-1]
    frame = source(spark, mq.namesrv, subscribe=TOPIC, startingTimestamp=first, endingTimestamp=last)
    wanted = sorted(int(m.body) for m in stored if first <= m.store_timestamp < last)
    assert numbers(frame) == wanted
    assert source(spark, mq.namesrv, subscribe=TOPIC, startingTimestamp=last + 1).count() == 0
    assert source(spark, mq.namesrv, subscribe=TOPIC, startingTimestamp="1970-01-01T00:00:00Z").count() == COUNT
    of_one_queue = json.dumps({TOPIC: {"broker-a": {"0": last + 1}}})
    by_queue = source(spark, mq.namesrv, subscribe=TOPIC, startingOffsetsByTimestamp=of_one_queue)
    assert numbers(by_queue) == sorted(int(m.body) for m in stored if m.queue.queue_id != 0)


def test_filters_narrow_the_read_and_are_checked_again(spark: SparkSession, mq: EmbeddedBroker) -> None:
    frame = source(spark, mq.namesrv, subscribe=TOPIC, pushDownFilters=True, minPartitions=4)
    plain = source(spark, mq.namesrv, subscribe=TOPIC).cache()
    moment = plain.agg(F.max("store_time")).head()[0]  # type: ignore[index]
    for condition in (
        F.col("queue_id").isin(0, 3) & (F.col("queue_offset") >= 1) & (F.col("queue_offset") < 4),
        (F.col("tags") == "b") & (F.col("topic") == TOPIC),
        F.col("tags").isin("a", "b") & (F.col("tags") != "a"),
        F.col("store_time") >= moment,
        F.col("store_time") < moment,
        (F.col("broker") == "broker-z") | (F.col("queue_id") == 1),
    ):
        assert numbers(frame.where(condition)) == numbers(plain.where(condition)), condition
    narrow = frame.where("queue_id = 2 and queue_offset < 1")
    assert narrow.rdd.getNumPartitions() <= 2


def test_topics_by_pattern_without_those_of_the_system(spark: SparkSession) -> None:
    with broker() as mq:
        for topic in ("sales-eu", "sales-us", "other"):
            send(mq, topic, range(3))
        frame = source(spark, mq.namesrv, subscribePattern="sales-.*")
        assert {row.topic for row in frame.collect()} == {"sales-eu", "sales-us"}
        assert source(spark, mq.namesrv, subscribePattern=".*").count() == 9
        assert source(spark, mq.namesrv, subscribePattern="none").count() == 0
        assert source(spark, mq.namesrv, subscribe="sales-eu, other").count() == 6


def test_compressed_bodies_are_inflated_and_capped(spark: SparkSession, mq: EmbeddedBroker) -> None:
    body = b"long " * 4000
    producer = mq.producer(config=ProducerConfig(compress_over_bytes=100))
    producer.send(Message("compressed", body))
    producer.send(Message("compressed", b"short"))
    frame = source(spark, mq.namesrv, subscribe="compressed")
    assert {bytes(row.body) for row in frame.collect()} == {body, b"short"}
    assert frame.where("sys_flag % 2 = 1").count() == 1
    with pytest.raises(Exception, match=r"is larger than 1000 bytes when decompressed"):
        source(spark, mq.namesrv, subscribe="compressed", maxBodyBytes=1000).collect()


def test_retry_and_dead_letter_topics_are_topics(spark: SparkSession, mq: EmbeddedBroker) -> None:
    mq.create_topic("%DLQ%billing", 1)
    mq.producer().send(Message("%DLQ%billing", b"1"))
    assert numbers(source(spark, mq.namesrv, subscribe="%DLQ%billing")) == [1]
    assert source(spark, mq.namesrv, subscribePattern="%DLQ%.*").count() == 1


def test_two_brokers_and_where_a_group_is(spark: SparkSession) -> None:
    with broker() as one, broker({"namesrvAddr": one.namesrv, "brokerName": "broker-b"}):
        send(one, "spread", range(50))
        options = {"subscribe": "spread", "group": "billing", "startingOffsets": "group"}
        first = source(spark, one.namesrv, **options)
        assert first.count() == 50, "what a group has not committed is still to be read"
        _commit(one, "billing", "spread")
        assert first.count() == 50, "a DataFrame stays what it was when it was planned"
        assert source(spark, one.namesrv, **options).count() == 0
        send(one, "spread", range(50, 60))
        assert numbers(source(spark, one.namesrv, **options)) == list(range(50, 60))
        upto = source(spark, one.namesrv, subscribe="spread", group="billing", endingOffsets="group")
        assert numbers(upto) == list(range(50))


def _commit(one: EmbeddedBroker, group: str, topic: str) -> None:
    """Let a group be where the topic ends, on both brokers."""
    import asyncio

    from downrange.client.consumer.pull import PullConsumer

    async def commit() -> None:
        async with PullConsumer(group, one.namesrv) as consumer:
            for queue in await consumer.queues(topic):
                await consumer.commit(queue, await consumer.max_offset(queue))

    asyncio.run(commit())


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_rows_arrive_whole(spark: SparkSession, count: int) -> None:
    with broker() as mq:
        mq.create_topic("many", 4)
        sent = send(mq, "many", range(count), size=20)
        frame = source(spark, mq.namesrv, subscribe="many")
        row = frame.agg(
            F.count("*").alias("rows"),
            F.sum(F.crc32("body")).alias("checksum"),
            F.count_distinct("queue_id", "queue_offset").alias("places"),
        ).head()
        assert row is not None
        assert (row.rows, row.checksum, row.places) == (count, checksum(sent), count)
        wait_for_queue_files(mq.data / "store", "many", count)
        files = spark.read.format("rocketmq").options(storePath=str(mq.data / "store"), subscribe="many").load()
        again = files.agg(F.count("*").alias("rows"), F.sum(F.crc32("body")).alias("checksum")).head()
        assert again is not None
        assert (again.rows, again.checksum) == (row.rows, row.checksum)


def test_rows_of_a_queue_are_in_order_within_a_task(spark: SparkSession, mq: EmbeddedBroker) -> None:
    frame = source(spark, mq.namesrv, subscribe=TOPIC)
    seen: dict[int, list[int]] = {}
    for row in frame.select("queue_id", "queue_offset").collect():
        seen.setdefault(row.queue_id, []).append(row.queue_offset)
    assert all(offsets == sorted(offsets) for offsets in seen.values())
    assert sum(len(offsets) for offsets in seen.values()) == len(bodies(frame)) == COUNT


def test_a_dead_master_is_read_from_its_slave(spark: SparkSession) -> None:
    names = {"brokerName": "copied"}
    with broker() as mq, ExitStack() as master_only:
        names["namesrvAddr"] = mq.namesrv
        master_only.enter_context(broker({**names, "brokerRole": "SYNC_MASTER"}))
        with broker({**names, "brokerRole": "SLAVE", "brokerId": "1"}):
            mq.create_topic("orders", 1)
            producer = mq.producer()
            queue = MessageQueue("orders", "copied", 0)
            deadline = time.monotonic() + 20
            kept = 0
            while kept < 5 and time.monotonic() < deadline:  # the slave needs a moment to find its master
                kept += producer.send(Message("orders", b"7"), queue=queue).status is SendStatus.SEND_OK
            assert kept == 5
            choice = json.dumps({"orders": {"copied": [0]}})
            stored = source(spark, mq.namesrv, assign=choice).count()
            master_only.close()
            assert source(spark, mq.namesrv, assign=choice).count() == stored >= 5
