"""Reading store directories: those of the genuine broker, and live, stopped and copied ones of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from downrange.model.message import MessageQueue
from downrange.spark.options import parse_options
from downrange.spark.store_reader import Stores
from downrange.testing import broker
from tests.spark.messages import numbers, send, wait_for_queue_files
from tests.support.golden_store import unpack


def files(spark: SparkSession, path: Path, **options: object) -> DataFrame:
    given = {"brokerName": "broker-a", **{k: str(v) for k, v in options.items()}}
    return spark.read.format("rocketmq").options(storePath=str(path), **given).load()


@pytest.mark.parametrize("name", ["clean", "killed"])
def test_a_store_of_the_genuine_broker(spark: SparkSession, tmp_path: Path, name: str) -> None:
    store = unpack(name, tmp_path)
    wanted = {}
    for message in store.records():
        wanted[message.topic, message.queue_id, message.queue_offset] = message
    frame = files(spark, store.root, subscribePattern="[^%].*", brokerName="genuine", includeProperties=True)
    rows = frame.collect()
    assert rows
    for row in rows:
        message = wanted.pop((row.topic, row.queue_id, row.queue_offset))
        assert (row.broker, row.physical_offset, row.tags) == ("genuine", message.physical_offset, message.tags)
        assert row.properties == message.properties
    assert {topic for topic, _, _ in wanted} <= {topic for topic, *_ in wanted if topic[0] == "%" or "SYS" in topic
                                                 or topic == "SCHEDULE_TOPIC_XXXX"}  # fmt: skip


def test_a_store_that_is_stopped_copied_live_and_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with broker(data=data) as mq:
        mq.create_topic("orders", 4)
        send(mq, "orders", range(100))
    stopped = data / "store"
    assert numbers(files(spark, stopped, subscribe="orders", minPartitions=3)) == list(range(100))
    unnamed = spark.read.format("rocketmq").options(storePath=str(stopped), subscribe="orders").load()
    assert {row.broker for row in unnamed.select("broker").distinct().collect()} == {"store"}, "as the directory"
    shutil.copytree(stopped, tmp_path / "copy")
    assert numbers(files(spark, tmp_path / "copy", subscribe="orders", tags="b")) == list(range(1, 100, 3))
    choice = json.dumps({"orders": {"broker-a": [1]}})
    one_queue = files(spark, stopped, assign=choice)
    assert {row.queue_id for row in one_queue.collect()} == {1}
    times = sorted(row.store_time for row in files(spark, stopped, subscribe="orders").collect())
    late = files(spark, stopped, subscribe="orders", startingTimestamp=round(times[50].timestamp() * 1000))
    assert late.count() == sum(time >= times[50] for time in times)

    with broker(data=data) as mq:
        send(mq, "orders", range(100, 120))
        wait_for_queue_files(stopped, "orders", 120)
        stream = spark.readStream.format("rocketmq").options(
            storePath=str(stopped), subscribe="orders", startingOffsets="earliest"
        )
        query = stream.load().writeStream.format("memory").queryName("live").trigger(availableNow=True).start()
        query.awaitTermination()
        assert numbers(spark.table("live")) == list(range(120))


def test_files_that_were_deleted(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with broker({"mappedFileSizeCommitLog": str(1 << 20), "maxMessageSize": "200000"}, data=data) as mq:
        mq.create_topic("orders", 1)
        send(mq, "orders", range(4000), size=1000)
    log = sorted((data / "store" / "commitlog").iterdir())
    log[0].unlink()
    whole = {"subscribe": "orders", "startingOffsets": json.dumps({"orders": {"broker-a": {"0": 0}}})}
    with pytest.raises(Exception, match=r"messages 0 to \d+ were deleted before they were read"):
        files(spark, data / "store", **whole).count()
    left = numbers(files(spark, data / "store", **whole, failOnDataLoss=False))
    assert left == list(range(left[0], 4000))
    assert 100 < left[0] < 1000
    assert numbers(files(spark, data / "store", subscribe="orders")) == left, "earliest is what is there"
    log[1].unlink()
    log[-1].write_bytes(bytes(1 << 20))  # as after a crash: the queue points behind the end of the log
    cut = numbers(files(spark, data / "store", subscribe="orders"))
    assert cut == list(range(cut[0], cut[-1] + 1))
    assert left[0] < cut[0] < cut[-1] < 3999


def test_what_is_no_store_is_said(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"is not a store: it has no directory commitlog"):
        files(spark, tmp_path, subscribe="orders").count()
    with pytest.raises(Exception, match=r"sqlFilter needs a broker"):
        files(spark, tmp_path, subscribe="orders", sqlFilter="a > 1").count()


def test_queues_are_told_apart(tmp_path: Path) -> None:
    store = unpack("clean", tmp_path)
    stores = Stores(parse_options({"storePath": str(store.root), "subscribePattern": ".*", "brokerName": "b"}))
    reach = stores.reach(stores.queues(), must_answer=True)
    table = store.manifest
    counted: dict[MessageQueue, int] = {}
    for message in store.records():
        queue = MessageQueue(message.topic, "b", message.queue_id)
        counted[queue] = max(counted.get(queue, 0), message.queue_offset + 1)
    assert table
    assert {queue: there.maximum for queue, there in reach.items()} == {q: counted[q] for q in reach}
