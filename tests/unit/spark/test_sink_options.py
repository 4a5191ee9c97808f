"""Options and columns of a write: what is refused before anything is sent, and in which words."""

from __future__ import annotations

import pickle

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from downrange.spark.delivery import Level
from downrange.spark.errors import OptionError, SchemaMismatch
from downrange.spark.sink import batch_writer, stream_writer
from downrange.spark.sink_options import SinkOptions, sink_options
from downrange.spark.sink_rows import check_columns

MAP = MapType(StringType(), StringType())


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def test_names_come_without_their_case() -> None:
    options = sink_options({"NAMESRV": "a:1;b:2", "deliverylevel": "idempotent", "batchBytes": "2048"})
    assert options.delivery_level is Level.IDEMPOTENT
    assert options.client_config().namesrv_addresses == ("a:1", "b:2")
    assert options.batch_bytes == 2048


def test_what_spark_passes_on_is_not_ours() -> None:
    assert sink_options({"checkpointlocation": "/c", "queryname": "q", "path": "p"}) == SinkOptions()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deliveryLevels": "x"}, "unknown option deliveryLevels of the RocketMQ sink; did you mean deliveryLevel?"),
        ({"zzz": "x"}, "there are namesrv, topic, deliveryLevel"),
        ({"deliveryLevel": "exactly-once"}, "at-least-once or idempotent or transactional"),
        ({"batchBytes": "much"}, "batchBytes=much: expected a whole number from 1024"),
        ({"maxInFlight": "0"}, "maxInFlight=0: expected a whole number of at least 1"),
        ({"sendTimeout": "soon"}, "sendTimeout=soon: expected a number with ms, s, m, h or d"),
        ({"accessKey": "me"}, "accessKey and secretKey go together"),
        ({"namesrv": "here"}, "here"),
        ({"namesrv": ""}, "no name server address"),
        ({"topic": "bad topic"}, "bad topic"),
        ({"producerGroup": "bad group"}, "bad group"),
        ({"markerTopic": "a/b"}, "a/b"),
        ({"writeId": "a/b"}, "writeId=a/b: expected up to 100 letters"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(given: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        sink_options(given)
    assert words in str(refused.value)


def test_the_secret_is_not_shown() -> None:
    options = sink_options({"accessKey": "me", "secretKey": "hush"})
    assert options.client_config().secret_key == "hush"  # noqa: S105
    assert "hush" not in repr(options)


def test_options_travel_to_workers_and_name_their_client() -> None:
    options = sink_options({"topic": "orders"})
    assert pickle.loads(pickle.dumps(options)) == options  # noqa: S301
    assert len({options, sink_options({"topic": "orders"})}) == 1


def test_every_column_in_each_of_its_types() -> None:
    for keys in (StringType(), ArrayType(StringType(), containsNull=False)):
        for body in (BinaryType(), StringType()):
            for delay, deliver_at in ((IntegerType(), TimestampType()), (LongType(), LongType())):
                every = schema(
                    topic=StringType(),
                    body=body,
                    tags=StringType(),
                    keys=keys,
                    sharding_key=StringType(),
                    delay=delay,
                    deliver_at=deliver_at,
                    properties=MAP,
                )
                check_columns(every, SinkOptions())


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (schema(topic=StringType()), {}, "the column body is missing"),
        (schema(body=BinaryType()), {}, "the column topic is missing; without it the option topic must name one"),
        (schema(topic=StringType(), body=DoubleType()), {}, "the column body is double; expected binary or string"),
        (schema(body=StringType(), tag=StringType()), {"topic": "t"}, "no column tag: did you mean tags?"),
        (schema(body=StringType(), wxyz=StringType()), {"topic": "t"}, "a message has topic, body, tags"),
        (schema(body=StringType(), delay=StringType()), {"topic": "t"}, "the column delay is string; expected int"),
        (schema(body=StringType(), keys=ArrayType(LongType())), {"topic": "t"}, "keys is array<bigint>"),
        (
            schema(body=StringType(), properties=MapType(StringType(), LongType())),
            {"topic": "t"},
            "properties is map<string,bigint>; expected map<string,string>",
        ),
        (
            schema(body=StringType(), delay=IntegerType()),
            {"topic": "t", "deliveryLevel": "transactional"},
            "the column delay does not go with deliveryLevel=transactional",
        ),
        (
            schema(body=StringType(), deliver_at=TimestampType()),
            {"topic": "t", "deliveryLevel": "transactional"},
            "the column deliver_at does not go with deliveryLevel=transactional",
        ),
        (
            schema(body=StringType(), deliver_at=TimestampNTZType()),
            {"topic": "t"},
            "the column deliver_at is timestamp_ntz; expected timestamp, or bigint for milliseconds since 1970",
        ),
        (StructType([*schema(body=StringType()), *schema(body=StringType())]), {"topic": "t"}, "stands twice"),
    ],
)
def test_a_column_that_cannot_be_is_refused_by_name(columns: StructType, options: dict[str, str], words: str) -> None:
    for writer in (batch_writer, stream_writer):
        with pytest.raises(SchemaMismatch) as refused:
            writer(options, columns, False)
        assert words in str(refused.value)


def test_a_topic_is_not_overwritten() -> None:
    for writer in (batch_writer, stream_writer):
        with pytest.raises(OptionError, match="a topic cannot be overwritten: use mode append"):
            writer({"topic": "t"}, schema(body=BinaryType()), True)


def test_an_idempotent_batch_write_needs_a_name_and_a_stream_has_one() -> None:
    with pytest.raises(OptionError, match="needs the option writeId"):
        batch_writer({"topic": "t", "deliveryLevel": "idempotent"}, schema(body=BinaryType()), False)
    stream_writer({"topic": "t", "deliveryLevel": "idempotent"}, schema(body=BinaryType()), False)
    with pytest.raises(OptionError, match="a stream is identified by its checkpoint"):
        stream_writer({"topic": "t", "writeId": "w"}, schema(body=BinaryType()), False)
