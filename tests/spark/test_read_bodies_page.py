"""The queries and examples of docs/how-to/read-bodies.md, and the windows of docs/how-to/archive-to-parquet.md, run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import fastavro
import pytest
from google.protobuf.struct_pb2 import Struct
from pyspark.sql import DataFrame, SparkSession

from downrange import Message
from downrange.clock import ManualClock
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.sql import View, ViewKind, sql, start_stream
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example

PAGE = ROOT / "docs" / "how-to" / "read-bodies.md"
SQL_PAGE = ROOT / "docs" / "how-to" / "archive-to-parquet.md"


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


def query(page: Path, name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```sql\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def view(mq: EmbeddedBroker, topic: str) -> View:
    return View("orders", ViewKind.TOPIC, topic, {"namesrv": mq.namesrv, "startingOffsets": "earliest"})


def test_json(spark: SparkSession, mq: EmbeddedBroker) -> None:
    for number in (5, 11, 12):
        mq.producer().send(Message("json-orders", json.dumps({"id": number, "price": number + 0.5}).encode()))
    mq.producer().send(Message("json-orders", b"no JSON"))
    found = sql(spark, query(PAGE, "json"), [view(mq, "json-orders")]).collect()
    assert sorted(tuple(row) for row in found) == [(11, 11.5), (12, 12.5)]


@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_protobuf_and_avro(spark: SparkSession, mq: EmbeddedBroker, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}],
    }
    for number, name in enumerate(("ann", "bob")):
        message = Struct()
        message.update({"id": number, "name": name})
        mq.producer().send(Message("proto-orders", message.SerializeToString()))
        encoded = io.BytesIO()
        fastavro.schemaless_writer(encoded, schema, {"id": number, "name": name})
        mq.producer().send(Message("avro-orders", encoded.getvalue()))
    for name, shown in (("protobuf", "ANN BOB"), ("avro", "ann bob")):
        exec(example(PAGE, name).replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
        first, second = shown.split()
        assert capsys.readouterr().out == f"[Row(id=0, name='{first}'), Row(id=1, name='{second}')]\n"


def test_windows_are_shown_once_when_the_watermark_has_passed_them(spark: SparkSession) -> None:
    rows: list[tuple[int, str, int]] = []

    def keep(batch: DataFrame) -> None:
        found = batch.selectExpr("unix_timestamp(start) AS start", "tags", "n").collect()
        rows.extend((row["start"], row["tags"], row["n"]) for row in found)

    with broker(clock=ManualClock()) as mq:
        mq.create_topic("orders", 1)
        producer = mq.producer()
        for _ in range(4):  # minutes
            for tag in ("paid", "paid", "new"):
                producer.send(Message("orders", b"x", tag))
            mq.advance(60)
        first = mq.messages("orders")[0].store_timestamp // 60_000 * 60
        result = sql(spark, query(SQL_PAGE, "windows"), [view(mq, "orders")], streaming=True, watermark="10 seconds")
        start_stream(result, on_rows=keep, until_caught_up=True, name="windows").awaitTermination()
    counts = (("paid", 2), ("new", 1))  # the last minute is still open
    assert sorted(rows) == sorted((first + 60 * minute, *count) for minute in range(3) for count in counts)


def test_a_watermark_that_is_none(spark: SparkSession, mq: EmbeddedBroker) -> None:
    with pytest.raises(PipelineError, match="expected a number and second"):
        sql(spark, "SELECT 1", [view(mq, "orders")], streaming=True, watermark="soon")
