from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.types import BinaryType, StructField, StructType

from downrange import Message
from downrange.client.trace import encode_pub
from downrange.model.topics import TRACE_TOPIC
from downrange.spark.lake.lake import Lake
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.stats import lake_inputs, sends, stats, traffic
from downrange.spark.schema import message_schema
from tests.support.lake_messages import commit, messages

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def row(seconds: float, latency_millis: int, *, topic: str = "orders", tag: str | None = "paid", size: int = 10) -> Row:
    stored = NOON + timedelta(seconds=seconds)
    values = dict.fromkeys(message_schema().names)
    values |= {
        "topic": topic,
        "broker": "broker-a",
        "queue_id": 0,
        "tags": tag,
        "body": b"x" * size,
        "store_time": stored,
        "born_time": stored - timedelta(milliseconds=latency_millis),
    }
    return Row(**values)


def frame(spark: SparkSession, *rows: Row) -> DataFrame:
    return spark.createDataFrame(list(rows), message_schema())


def traces(spark: SparkSession, *bodies: str) -> DataFrame:
    schema = StructType([StructField("body", BinaryType())])
    return spark.createDataFrame([(body.encode(),) for body in bodies], schema)


def pub(seconds: float, cost: int, *, host: str = "10.0.0.1:10911", succeeded: bool = True) -> str:
    text = encode_pub(
        timestamp=int((NOON + timedelta(seconds=seconds)).timestamp() * 1000),
        region_id="DefaultRegion",
        group="billing",
        message=Message("orders", b"body"),
        message_id="id",
        store_host=host,
        cost_millis=cost,
        offset_message_id="offset id",
    )
    return text if succeeded else text.replace("\x01true\x02", "\x01false\x02")


def test_messages_are_counted_by_window_topic_tag_and_queue(spark: SparkSession) -> None:
    rows = [row(second, second + 1) for second in range(100)]
    rows += [row(5, 3, tag=None, size=1000), row(5, -7, topic="payments")]
    found = {
        (one["start"].minute, one["topic"], one["tags"]): one
        for one in traffic(frame(spark, *rows), "1 minute").collect()
    }
    assert {key: one["messages"] for key, one in found.items()} == {
        (0, "orders", "paid"): 60,
        (1, "orders", "paid"): 40,
        (0, "orders", None): 1,
        (0, "payments", "paid"): 1,
    }
    first = found[0, "orders", "paid"]
    assert (first["bytes"], first["largest_bytes"]) == (600, 10)
    assert (first["latency_p50_millis"], first["latency_p99_millis"], first["latency_max_millis"]) == (30, 60, 60)
    assert found[0, "payments", "paid"]["latency_max_millis"] == -7  # clocks differ, and that is worth seeing


def test_sends_are_counted_by_broker(spark: SparkSession) -> None:
    old = "\x01".join([*pub(1, 8).rstrip("\x02").split("\x01")[:12], "true"]) + "\x02"  # 13 fields: no offset id
    junk = (
        "Pub\x01x\x02SubBefore\x01" + "1\x01" * 8 + "\x02" + pub(1, 5).replace(f"\x01{5}\x01", "\x01many\x01") + "\x02"
    )
    bodies = [
        "".join(pub(second, second) for second in range(10)),
        pub(3, 500, host="10.0.0.2:10911", succeeded=False) + pub(4, 5, host="10.0.0.2:10911"),
        pub(70, 1),
        old,
        junk,
    ]
    rows = {
        (one["start"].minute, one["store_host"]): one for one in sends(traces(spark, *bodies), "1 minute").collect()
    }
    assert {key: (one["sends"], one["failed"]) for key, one in rows.items()} == {
        (0, "10.0.0.1:10911"): (11, 0),
        (0, "10.0.0.2:10911"): (2, 1),
        (1, "10.0.0.1:10911"): (1, 0),
    }
    assert rows[0, "10.0.0.2:10911"]["failure_rate"] == 0.5
    assert rows[0, "10.0.0.2:10911"]["send_max_millis"] == 500


def test_everything_is_written_and_drawn(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    traced = messages(0, 2, topic=TRACE_TOPIC)
    at = traced.schema.get_field_index("body")
    traced = traced.set_column(
        at, "body", pa.array([pub(0, 3).encode(), pub(90, 4, succeeded=False).encode()], pa.binary())
    )
    commit(lake, 0, messages(0, 100, millis=2000), messages(0, 50, topic="payments"), traced)
    inputs = lake_inputs(spark, lake, (), traces=True)
    report = stats(spark, *inputs, tmp_path / "out", window="1 minute")
    assert (report.messages, report.sends, report.failed_sends) == (150, 2, 1)
    assert report.windows == 4
    names = {path.name for path in report.written}
    assert names == {
        *("traffic", "messages.png", "bytes.png", "latency.png"),
        *("sends", "send-latency.png", "send-failures.png"),
    }
    for path in report.written:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.stat().st_size > 5000
    assert pq.read_table(tmp_path / "out" / "traffic").num_rows == report.messages - 150 + 4 * 3 + 3
    with pytest.raises(PipelineError, match="is there already"):
        stats(spark, *inputs, tmp_path / "out")


def test_nothing_to_count_is_no_error(spark: SparkSession, tmp_path: Path) -> None:
    report = stats(spark, *lake_inputs(spark, Lake.create(tmp_path / "lake"), (), traces=False), tmp_path / "out")
    assert (report.messages, report.windows, report.written) == (0, 0, [tmp_path / "out" / "traffic"])


@pytest.mark.parametrize("window", ["", "1", "minute", "0 minutes", "1 month", "1 minute; DROP"])
def test_a_window_that_is_none(spark: SparkSession, tmp_path: Path, window: str) -> None:
    empty = frame(spark)
    with pytest.raises(PipelineError, match="expected a number and second, minute, hour or day"):
        stats(spark, empty, None, tmp_path, window=window)
