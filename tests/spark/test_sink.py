"""Writing DataFrames and streams to a real broker, in the shared Spark session."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, concat, expr, lit

from downrange.model.message import Message
from downrange.settings import settings_of
from downrange.spark.sink_options import SinkOptions
from downrange.spark.sink_rows import COLUMNS
from downrange.testing import EmbeddedBroker, broker
from tests.support.dying_sink import (
    AFTER_CLOSE,
    AFTER_DECIDE,
    AFTER_END,
    AMID_END,
    BEFORE_COMMIT,
    TASK,
    dying_source,
    write_stream,
)

LEVELS = ["at-least-once", "idempotent", "transactional"]
MARKERS = "SPARK_SINK_MARKERS"


def write(frame: DataFrame, mq: EmbeddedBroker, **options: str) -> None:
    frame.write.format("rocketmq").mode("append").option("namesrv", mq.namesrv).options(**options).save()


def bodies(mq: EmbeddedBroker, topic: str = "orders") -> Counter[str]:
    return Counter(message.body.decode() for message in mq.messages(topic))


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).select(col("id").cast("string").alias("body"))


def expected(count: int) -> Counter[str]:
    return Counter(map(str, range(count)))


# --- batch writes -------------------------------------------------------------------------------------------------


def test_every_column_of_a_row_arrives(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    frame = spark.sql(
        "select 'orders' topic, X'00FF' body, 'paid' tags, array('k1', 'k2') keys, 'customer' sharding_key, "
        "map('colour', 'red') properties"
    )
    write(frame, rocketmq)
    (message,) = rocketmq.messages("orders")
    assert message.body == b"\x00\xff"
    assert message.tags == "paid"
    assert message.properties["KEYS"] == "k1 k2"
    assert message.properties["colour"] == "red"
    assert message.properties["__SHARDINGKEY"] == "customer"
    assert message.properties["SPARK_ROW"].endswith("/0/0/0")


def test_rows_choose_their_topic_and_the_option_overrides_them(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    frame = spark.sql("select explode(array('a', 'b', 'b')) topic, 'x' body")
    write(frame, rocketmq)
    write(frame, rocketmq, topic="c")
    assert [len(rocketmq.messages(topic)) for topic in "abc"] == [1, 2, 3]


def test_a_delayed_row_waits_on_the_broker(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    write(spark.sql("select 'orders' topic, 'later' body, 18 delay"), rocketmq)
    (message,) = rocketmq.messages("SCHEDULE_TOPIC_XXXX")
    assert message.properties["REAL_TOPIC"] == "orders"
    assert message.properties["DELAY"] == "18"
    assert rocketmq.messages("orders") == []


@pytest.mark.parametrize("type_", ["timestamp", "bigint"])
def test_a_row_is_delivered_at_its_time(spark: SparkSession, rocketmq: EmbeddedBroker, type_: str) -> None:
    due = int(time.time() * 1000) + 2500
    late = due + 3_600_000
    rows = [("orders", "now", None), ("orders", "soon", due), ("orders", "late", late)]
    frame = spark.createDataFrame(rows, "topic string, body string, deliver_at bigint")
    if type_ == "timestamp":
        frame = frame.withColumn("deliver_at", expr("timestamp_millis(deliver_at)"))
    write(frame, rocketmq)
    end = time.monotonic() + 30
    while len(found := rocketmq.messages("orders")) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    times = {message.body: message.store_timestamp for message in found}
    assert sorted(times) == [b"now", b"soon"]
    assert times[b"now"] < due <= times[b"soon"]


@pytest.mark.parametrize("level", ["at-least-once", "transactional"])
def test_rows_of_one_sharding_key_stay_in_order(spark: SparkSession, rocketmq: EmbeddedBroker, level: str) -> None:
    rocketmq.create_topic("orders", queues=8)
    frame = numbers(spark, 3000, partitions=1).withColumn("sharding_key", concat(lit("key"), expr("body % 13")))
    write(frame, rocketmq, topic="orders", deliveryLevel=level, batchBytes="4096")
    by_key: dict[str, list[tuple[int, int, int]]] = {}
    for message in rocketmq.messages("orders"):
        place = (message.queue_id, int(message.queue_offset), int(message.body))
        by_key.setdefault(message.properties["__SHARDINGKEY"], []).append(place)
    assert len(by_key) == 13
    for places in by_key.values():
        places.sort()
        assert len({queue_id for queue_id, _, _ in places}) == 1
        sent = [number for _, _, number in places]
        assert sent == sorted(sent)


@pytest.mark.parametrize("level", ["at-least-once", "transactional"])
def test_large_and_small_bodies_are_all_there(spark: SparkSession, rocketmq: EmbeddedBroker, level: str) -> None:
    frame = numbers(spark, 500).select(expr("repeat(concat(body, ' '), 1 + 400 * (body % 7))").alias("body"))
    write(frame, rocketmq, topic="orders", deliveryLevel=level)
    assert bodies(rocketmq) == Counter(f"{number} " * (1 + 400 * (number % 7)) for number in range(500))


def test_a_named_write_that_is_repeated_sends_nothing(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    for level in ("idempotent", "transactional"):
        for _ in range(2):
            write(numbers(spark, 100), rocketmq, topic=level, deliveryLevel=level, writeId=f"day-1-{level}")
        write(numbers(spark, 100), rocketmq, topic=level, deliveryLevel=level, writeId=f"day-2-{level}")
        assert bodies(rocketmq, level) == Counter({str(number): 2 for number in range(100)})


def test_a_write_that_fails_as_a_whole_shows_none_of_its_rows(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    frame = numbers(spark, 400).withColumn("tags", expr("if(body = '399', raise_error('no such order'), 'ok')"))
    with pytest.raises(Exception, match="no such order"):
        write(frame, rocketmq, topic="orders", deliveryLevel="transactional")
    assert rocketmq.messages("orders") == []
    assert rocketmq.messages(MARKERS) == []


# --- what is told when it does not work ---------------------------------------------------------------------------


def test_columns_are_checked_before_anything_is_sent(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    with pytest.raises(Exception, match="the sink knows no column tag: did you mean tags"):
        write(spark.sql("select 'x' body, 'a' tag"), rocketmq, topic="orders")
    with pytest.raises(Exception, match="unknown option deliverylevl of the RocketMQ sink; did you mean deliveryLevel"):
        write(spark.sql("select 'x' body"), rocketmq, topic="orders", deliveryLevl="transactional")


def test_a_row_that_cannot_be_sent_is_named(spark: SparkSession, rocketmq: EmbeddedBroker) -> None:
    with pytest.raises(Exception, match=r"row .*/0: body is null"):
        write(spark.sql("select 'orders' topic, cast(null as string) body"), rocketmq)


@pytest.mark.parametrize("level", LEVELS)
def test_the_brokers_reason_fails_the_task(spark: SparkSession, level: str) -> None:
    with broker({"maxMessageSize": "2000"}) as mq:
        frame = spark.sql("select 'orders' topic, repeat(uuid(), 2) body union all select 'orders', repeat('ab', 2000)")
        with pytest.raises(Exception, match=r"broker-a queue \d, \d+ ms: MESSAGE_ILLEGAL"):
            write(frame, mq, deliveryLevel=level, writeId="w")


def test_a_topic_nobody_may_write_fails_the_task(spark: SparkSession) -> None:
    with broker({"brokerPermission": "4"}) as mq:
        mq.create_topic("orders")
        with pytest.raises(Exception, match=r"has no queue that may be written|NO_PERMISSION"):
            write(spark.sql("select 'orders' topic, 'x' body"), mq, sendTimeout="1s")


def test_a_broker_that_is_gone_fails_the_task(spark: SparkSession) -> None:
    with broker() as mq:
        namesrv = mq.namesrv
    frame = spark.sql("select 'orders' topic, 'x' body")
    with pytest.raises(Exception, match=f"name server .*{namesrv}"):
        frame.write.format("rocketmq").mode("append").options(namesrv=namesrv, sendTimeout="1s").save()


# --- streams ------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Path:
    """Two hundred rows in four files."""
    directory = tmp_path / "source"
    rows = numbers(spark, 200, partitions=4).withColumn("sharding_key", expr("if(body % 2 = 0, 'even', null)"))
    rows.write.parquet(str(directory))
    return directory


def options_of(mq: EmbeddedBroker, level: str) -> dict[str, str]:
    return {"namesrv": mq.namesrv, "topic": "orders", "deliveryLevel": level}


@pytest.mark.parametrize("level", LEVELS)
def test_a_stream_of_several_batches_arrives_once(
    spark: SparkSession, rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, level: str
) -> None:
    for _ in range(2):  # the second finds nothing new
        write_stream(spark, "rocketmq", source, tmp_path / "checkpoint", options_of(rocketmq, level), files=2)
    assert bodies(rocketmq) == expected(200)
    rows = {message.properties["SPARK_ROW"] for message in rocketmq.messages("orders")}
    assert len(rows) == 200


def run_broken(
    spark: SparkSession, mq: EmbeddedBroker, source: Path, checkpoint: Path, level: str, point: str, name: str
) -> None:
    """A run that breaks at `point`, then a run that does not."""
    spark.dataSource.register(dying_source(name, point))
    with pytest.raises(Exception, match=point):
        write_stream(spark, name, source, checkpoint, options_of(mq, level))
    write_stream(spark, "rocketmq", source, checkpoint, options_of(mq, level))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "point",
    [
        TASK,
        AMID_END,
        AFTER_CLOSE,
        pytest.param(BEFORE_COMMIT, marks=SLOW),
        pytest.param(AFTER_DECIDE, marks=SLOW),
        pytest.param(AFTER_END, marks=SLOW),
    ],
)
def test_a_transactional_batch_that_breaks_anywhere_arrives_once(
    spark: SparkSession, rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, point: str
) -> None:
    run_broken(spark, rocketmq, source, tmp_path / "checkpoint", "transactional", point, "dying_transactional")
    assert bodies(rocketmq) == expected(200)


@pytest.mark.parametrize("point", [BEFORE_COMMIT, AFTER_CLOSE])
def test_an_idempotent_batch_is_repeated_only_before_its_marker(
    spark: SparkSession, rocketmq: EmbeddedBroker, source: Path, tmp_path: Path, point: str
) -> None:
    run_broken(spark, rocketmq, source, tmp_path / "checkpoint", "idempotent", point, "dying_idempotent")
    times = 2 if point == BEFORE_COMMIT else 1
    assert bodies(rocketmq) == Counter(dict.fromkeys(expected(200), times))
    rows = Counter(message.properties["SPARK_ROW"] for message in rocketmq.messages("orders"))
    assert set(rows.values()) == {times}, "a repeated row carries the same key"


def test_without_readable_markers_nothing_is_sent(
    spark: SparkSession, rocketmq: EmbeddedBroker, source: Path, tmp_path: Path
) -> None:
    rocketmq.producer().send(Message(MARKERS, b"no marker", keys="w"))
    with pytest.raises(Exception, match="holds a message that is no marker"):
        write(numbers(spark, 10), rocketmq, topic="orders", deliveryLevel="idempotent", writeId="w")
    assert rocketmq.messages("orders") == []


# --- the page -----------------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "spark-sink.md"


def test_the_page_runs_as_it_stands(spark: SparkSession, rocketmq: EmbeddedBroker, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    text = PAGE.read_text("utf-8").replace("127.0.0.1:9876", rocketmq.namesrv).replace("/tmp/", f"{tmp_path}/")  # noqa: S108
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(block, names)  # noqa: S102
    try:
        rocketmq.wait_for("numbers", 10, timeout=40)
    finally:
        names["query"].stop()
    assert bodies(rocketmq) == Counter({"7 apples": 2, "1 pear": 2})


def test_the_page_lists_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| (`.+?`) \| ?(.*?) ?\|", PAGE.read_text("utf-8").partition("## Options")[2], re.MULTILINE)
    listed = {name: default.strip("`") for names, default in rows for name in re.findall(r"`([\w.]+)`", names)}
    known = {one.key: str(getattr(one.default, "value", one.default or "")) for one in settings_of(SinkOptions)}
    assert {**listed, "namesrv": ""} == known


def test_the_page_lists_every_column() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text("utf-8").partition("## Guarantees")[0], re.MULTILINE)
    assert set(rows) == set(COLUMNS)
