"""Traces in a real trace topic become spans, percentiles and pictures, at once and as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.client.trace import ConsumeCode, encode_pub, encode_sub_after, encode_sub_before
from downrange.model.topics import TRACE_TOPIC
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.trace import checked, stream_trace, trace
from downrange.spark.pipelines.trace_events import trace_frame
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example

NOON = int(datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp() * 1000)


def sent(number: int, cost: int = 4) -> str:
    return encode_pub(
        timestamp=NOON + number * 1000,
        region_id="DefaultRegion",
        group="shop",
        message=Message("orders", b"body", "paid", f"key-{number}"),
        message_id=f"id-{number}",
        store_host="10.0.0.1:10911",
        cost_millis=cost,
        offset_message_id=f"offset-{number}",
    )


def delivered(number: int, after: int, *, cost: int = 10, retry: int = 0, ok: bool = True, ended: bool = True) -> str:
    """A delivery to `billing` that began `after` milliseconds after the message was born."""
    request = f"request-{number}-{retry}"
    time = NOON + number * 1000 + after
    begun = encode_sub_before(
        timestamp=time,
        region_id=None,
        group="billing",
        request_id=request,
        message_id=f"id-{number}",
        retry_times=retry,
        keys=None,
    )
    if not ended:
        return begun
    code = ConsumeCode.SUCCESS if ok else ConsumeCode.EXCEPTION
    return begun + encode_sub_after(
        timestamp=time + cost,
        group="billing",
        request_id=request,
        message_id=f"id-{number}",
        keys=None,
        cost_millis=cost,
        success=ok,
        code=code,
    )


@pytest.fixture(scope="module")
def traced() -> Iterator[EmbeddedBroker]:
    """Twenty messages: 3 failed once, 5 is still being consumed, 7 was late; two of later hours."""
    with broker() as mq:
        producer = mq.producer()
        for number in range(20):
            body = sent(number)
            if number == 3:
                body += delivered(3, 100, ok=False) + delivered(3, 10_100, retry=1)
            elif number == 7:
                body += delivered(7, 60_000, cost=500)
            else:
                body += delivered(number, 100, ended=number != 5)
            producer.send(Message(TRACE_TOPIC, body.encode()))
        producer.send(Message(TRACE_TOPIC, b"no trace at all"))
        producer.send(Message(TRACE_TOPIC, (sent(3600) + sent(7200)).encode()))
        yield mq


def test_sends_deliveries_and_retries_are_joined(spark: SparkSession, traced: EmbeddedBroker, tmp_path: Path) -> None:
    report = trace(spark, trace_frame(spark, {"namesrv": traced.namesrv}), tmp_path, window="1 hour")
    assert (report.messages, report.sends, report.deliveries, report.failed_deliveries, report.unfinished) == (
        22,
        22,
        21,
        1,
        1,
    )
    assert [path.name for path in report.written] == [
        "spans",
        "latency",
        "slowest",
        "trace-latency.png",
        "trace-failures.png",
    ]
    spans = spark.read.parquet(str(tmp_path / "spans")).where("message_id = 'id-3'").orderBy("time").collect()
    assert [(one["kind"], one["group"], one["topic"], one["retries"], one["success"]) for one in spans] == [
        ("send", "shop", "orders", None, True),
        ("delivery", "billing", "orders", 0, False),
        ("delivery", "billing", "orders", 1, True),
    ]
    assert spans[1]["broker"] == "10.0.0.1:10911"
    assert spans[1]["code"] == ConsumeCode.EXCEPTION
    figures = {
        row["stage"]: row
        for row in spark.read.parquet(str(tmp_path / "latency")).orderBy("start").collect()
        if row["start"].hour == datetime.fromtimestamp(NOON / 1000).hour  # noqa: DTZ006  collect gives local times
    }
    assert (figures["stored"]["count"], figures["stored"]["latency_p99_millis"]) == (20, 4)
    assert (figures["waited"]["count"], figures["waited"]["latency_p50_millis"]) == (20, 96)
    assert figures["waited"]["latency_max_millis"] == 59_996
    assert (figures["consumed"]["count"], figures["consumed"]["failed"]) == (20, 1)
    assert figures["consumed"]["failure_rate"] == 0.05
    assert (figures["total"]["count"], figures["total"]["latency_max_millis"]) == (19, 60_500)
    worst = spark.read.parquet(str(tmp_path / "slowest")).orderBy("total_millis", ascending=False).first()
    assert worst is not None
    assert (worst["message_id"], worst["total_millis"], worst["keys"]) == ("id-7", 60_500, "key-7")


@pytest.mark.slow  # three states to keep
@pytest.mark.timeout(600)
def test_windows_of_a_stream_end_with_the_watermark(
    spark: SparkSession, traced: EmbeddedBroker, tmp_path: Path
) -> None:
    read = stream_trace(
        spark,
        {"namesrv": traced.namesrv},
        str(tmp_path),
        window="1 hour",
        watermark="10 minutes",
        until_caught_up=True,
    )
    assert read == 22
    rows = spark.read.parquet(str(tmp_path / "latency")).collect()
    first = {row["stage"]: row for row in rows if row["start"].timestamp() * 1000 == NOON}
    assert (first["stored"]["count"], first["consumed"]["count"], first["consumed"]["failed"]) == (20, 20, 1)
    assert first["total"]["latency_max_millis"] == 60_500
    assert first["waited"]["latency_p50_millis"] == 96
    # The last event is of 14:00, so windows up to 13:50 have ended.
    assert {row["start"].timestamp() * 1000 for row in rows} == {NOON}


def test_a_window_that_is_none_is_refused_before_spark_starts() -> None:
    with pytest.raises(PipelineError, match="window 'soon'"):
        checked({}, "soon")


def test_the_example_of_the_page(
    spark: SparkSession, traced: EmbeddedBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / "docs" / "how-to" / "trace-a-message.md"
    text = example(page, "functions").replace("127.0.0.1:9876", traced.namesrv).replace('"out', f'"{tmp_path}/out')
    exec(text, {})  # noqa: S102  our own page
    shown = capsys.readouterr().out
    assert shown.startswith("22 sends, 21 deliveries, 1 failed\n")
    assert "billing" in shown
