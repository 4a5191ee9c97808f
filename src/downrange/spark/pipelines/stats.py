"""Counts messages, bytes and latencies by window, and the sends that clients traced.

`traffic` and `sends` are functions from DataFrame to DataFrame; `stats` reads, writes Parquet and draws.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  as everybody who writes Spark knows it

from downrange.model.topics import TRACE_TOPIC
from downrange.spark.lake.lake import Lake
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.frames import Options, lake_frame, topic_frame

_WINDOW: Final = re.compile(r"[1-9]\d* (second|minute|hour|day)s?")
RESULTS: Final = ("traffic", "sends")
_ENTRY: Final = "\x02"
_FIELD: Final = "\x01"
# The fields of a "Pub" entry: see client/trace.py.
_TIMESTAMP, _TOPIC, _STORE_HOST, _COST = 1, 4, 8, 10
_LEAST_FIELDS: Final = 13


@dataclass(frozen=True, slots=True)
class StatsReport:
    """The files that were written, and the most important sums."""

    messages: int
    bytes: int
    windows: int
    sends: int
    failed_sends: int
    written: list[Path] = field(default_factory=list)


def traffic(messages: DataFrame, window: str) -> DataFrame:
    """Counts, sizes and times from birth to storing, per window of the store time, topic, tag, broker and queue."""
    size = F.octet_length("body")
    # Clocks differ: a message may be stored "before" it was born.
    latency = (F.unix_micros("store_time") - F.unix_micros("born_time")) / 1000.0
    return (
        messages.withColumn("bytes_of", size)
        .withColumn("millis_of", latency)
        .groupBy(F.window("store_time", window).alias("span"), "topic", "tags", "broker", "queue_id")
        .agg(
            F.count("*").alias("messages"),
            F.sum("bytes_of").alias("bytes"),
            F.max("bytes_of").alias("largest_bytes"),
            *percentiles("millis_of", "latency"),
        )
        .select("span.start", "span.end", "*")
        .drop("span")
    )


def sends(traces: DataFrame, window: str) -> DataFrame:
    """Latency and failures of sends per window, broker and topic, from the messages of the trace topic."""
    entries = traces.select(F.explode(F.split(F.col("body").cast("string"), _ENTRY)).alias("entry"))
    fields = entries.select(F.split("entry", _FIELD).alias("fields"))
    published = fields.where((F.col("fields")[0] == "Pub") & (F.size("fields") >= _LEAST_FIELDS))
    # In traces of old clients the field before it, the offset message id, is missing.
    success = F.when(F.size("fields") == _LEAST_FIELDS, F.col("fields")[12]).otherwise(F.col("fields")[13])
    return (
        published.select(
            F.timestamp_millis(F.col("fields")[_TIMESTAMP].try_cast("long")).alias("time"),
            F.col("fields")[_STORE_HOST].alias("store_host"),
            F.col("fields")[_TOPIC].alias("topic"),
            F.col("fields")[_COST].try_cast("double").alias("millis_of"),
            (success == "true").alias("is_sent"),
        )
        .where(F.col("time").isNotNull() & F.col("millis_of").isNotNull())
        .groupBy(F.window("time", window).alias("span"), "store_host", "topic")
        .agg(
            F.count("*").alias("sends"),
            F.count_if(~F.col("is_sent")).alias("failed"),
            F.avg((~F.col("is_sent")).cast("double")).alias("failure_rate"),
            *percentiles("millis_of", "send"),
        )
        .select("span.start", "span.end", "*")
        .drop("span")
    )


def checked_window(window: str) -> None:
    """Refuse a text that is no length of a window."""
    if not _WINDOW.fullmatch(window):
        raise PipelineError(
            f"window {window!r}: expected a number and second, minute, hour or day, such as `5 minutes`"
        )


def made_directory(out: Path, results: Sequence[str]) -> Path:
    """The absolute path of `out`, made if missing; refuses a file, and a directory that has one of the results."""
    out = out.absolute()
    for name in results:
        if (out / name).exists():
            raise PipelineError(f"{out / name} is there already: name another directory, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if out.is_file() else error.strerror
        raise PipelineError(f"cannot write to {out}: {reason}") from None
    return out


def percentiles(column: str, name: str) -> list[Column]:
    """Aggregates of a column: `name_p50_millis`, p95, p99 and the maximum."""
    shares = ((50, 0.5), (95, 0.95), (99, 0.99))
    found = [F.percentile_approx(column, share).alias(f"{name}_p{number}_millis") for number, share in shares]
    return [*found, F.max(column).alias(f"{name}_max_millis")]


def stats(
    spark: SparkSession,
    messages: DataFrame,
    traces: DataFrame | None,
    out: Path,
    *,
    window: str = "1 minute",
    moments: Mapping[str, datetime] | None = None,
) -> StatsReport:
    """Write `traffic` and `sends` as Parquet under `out`, which must not have them, and draw them as PNG.

    `moments`, what happened and when, are marked in the pictures.
    """
    from downrange.spark.pipelines.plots import draw_sends, draw_traffic

    checked_window(window)
    out = made_directory(out, RESULTS)
    written = []
    with told_in_one_line():
        counted = _written(spark, traffic(messages.where(F.col("topic") != TRACE_TOPIC), window), out / "traffic")
        traced = _written(spark, sends(traces, window), out / "sends") if traces is not None else None
        totals = counted.agg(
            F.sum("messages").alias("messages"),
            F.sum("bytes").alias("bytes"),
            F.countDistinct("start").alias("windows"),
        ).first()
        sent = traced.agg(F.sum("sends").alias("sends"), F.sum("failed").alias("failed")).first() if traced else None
        written += [out / "traffic", *draw_traffic(counted, out, moments or {})]
        if traced is not None:
            written += [out / "sends", *draw_sends(traced, out, moments or {})]
    assert totals is not None
    return StatsReport(
        totals["messages"] or 0,
        totals["bytes"] or 0,
        totals["windows"],
        (sent["sends"] or 0) if sent else 0,
        (sent["failed"] or 0) if sent else 0,
        written,
    )


def topic_inputs(spark: SparkSession, source: Options, *, traces: bool) -> tuple[DataFrame, DataFrame | None]:
    """Messages that the options of `rocketmq` choose, and those of the trace topic, if there is one."""
    messages = topic_frame(spark, source, ("topic", "broker", "queue_id", "tags", "body", "born_time", "store_time"))
    if not traces:
        return messages, None
    chosen = {key: value for key, value in source.items() if key not in ("subscribe", "assign")}
    # By pattern: a cluster without traces has no such topic, which is no error.
    return messages, topic_frame(spark, {**chosen, "subscribePattern": TRACE_TOPIC}, ("body", "topic"))


def lake_inputs(
    spark: SparkSession, lake: Lake, topics: Sequence[str], *, traces: bool
) -> tuple[DataFrame, DataFrame | None]:
    """Messages of a lake, and its trace messages if they were archived."""
    return lake_frame(spark, lake, topics), lake_frame(spark, lake, [TRACE_TOPIC]) if traces else None


def _written(spark: SparkSession, frame: DataFrame, path: Path) -> DataFrame:
    """Write the frame as one file and return a frame that reads it, so that it is computed only once."""
    frame.orderBy("start").coalesce(1).write.option("compression", "zstd").parquet(str(path))
    return spark.read.parquet(str(path))
