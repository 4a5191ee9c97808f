"""Bad input: one line that says what to change, no Java frames."""

from __future__ import annotations

import re

import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import send, source


@pytest.fixture(scope="module")
def mq() -> EmbeddedBroker:  # type: ignore[misc]
    with broker() as running:
        running.create_topic("orders", 1)
        send(running, "orders", range(3))
        yield running


def text_of(error: BaseException) -> str:
    return re.sub(r"\s*SQLSTATE: \w+", "", str(error)).strip()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"subscribe": "orders", "startingOffset": "latest"},
            "unknown option startingoffset; did you mean startingOffsets?",
        ),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {'}, "startingOffsets is not what is expected"),
        ({}, "give one of subscribe, subscribePattern and assign"),
        ({"subscribe": "missing"}, "no topic missing that may be read, says name server"),
        ({"subscribe": "orders", "sqlFilter": "amount >"}, "sqlFilter=amount >: position 9"),
        ({"assign": '{"orders": {"broker-z": [0]}}'}, "no topic orders"),
        ({"subscribe": "orders", "startingOffsets": '{"orders": {"broker-a": {"9": 1}}}'}, "names queues that are not"),
        (
            {"subscribe": "orders", "startingOffsets": '{"orders": {"broker-a": {"0": 77}}}'},
            "message 77 was to be read",
        ),
    ],
)
def test_of_a_read(spark: SparkSession, mq: EmbeddedBroker, options: dict[str, str], expected: str) -> None:
    with pytest.raises(AnalysisException) as caught:
        source(spark, mq.namesrv, **options).count()
    message = text_of(caught.value)
    assert expected in message
    assert "Traceback" not in message
    assert len(message.splitlines()) == 1


def test_a_name_server_that_does_not_answer(spark: SparkSession) -> None:
    with pytest.raises(AnalysisException, match=r"no name server answers \(.*127\.0\.0\.1:1[^0-9]"):
        source(spark, "127.0.0.1:1", subscribe="orders").count()


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("topic string, price double", "no column price; there are topic, broker,"),
        ("queue_offset int", "column queue_offset is bigint, not int"),
    ],
)
def test_a_schema_that_does_not_fit(spark: SparkSession, mq: EmbeddedBroker, schema: str, expected: str) -> None:
    frame = spark.read.format("rocketmq").options(namesrv=mq.namesrv, subscribe="orders").schema(schema).load()
    with pytest.raises(PySparkException) as caught:
        frame.count()
    assert expected in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": "missing"}, "no topic missing that may be read"),
        ({"subscribe": "orders", "endingOffsets": "latest"}, "a stream has no end"),
    ],
)
def test_of_a_stream(spark: SparkSession, mq: EmbeddedBroker, options: dict[str, str], expected: str) -> None:
    frame = spark.readStream.format("rocketmq").options(namesrv=mq.namesrv, **options).load()
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination()
    assert expected in str(caught.value)
    assert "Traceback" not in str(caught.value)
