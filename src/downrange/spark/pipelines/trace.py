"""Traces joined to spans: each send, and each delivery of a message to each group; how long they took, what failed.

`spans`, `latency`, `slowest` and `latency_stream` are functions from DataFrame to DataFrame; `trace` reads, writes
Parquet and draws, `stream_trace` writes windows as they end.

Stages, all in milliseconds; times are those of the clients' clocks, so a stage may be negative:

    stored      from born to acknowledged by a broker
    waited      from acknowledged to the first call of a callback of a group
    consumed    one call of a callback; retries are calls of their own
    total       from born to the end of a call that succeeded
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.pipelines.errors import told_in_one_line
from downrange.spark.pipelines.frames import place
from downrange.spark.pipelines.plots import draw_trace
from downrange.spark.pipelines.stats import checked_window, made_directory, percentiles
from downrange.spark.pipelines.trace_events import BEGIN, END, SEND, events, trace_frame, trace_options
from downrange.spark.progress import lag_of, status_of

KIND: Final = "trace"
RESULTS: Final = ("spans", "latency", "slowest")
SLOWEST: Final = 100
BRANCHES: Final = 3
"""How often `latency_stream` uses its input: Spark reads the source, and counts its rows, for each of them."""
BY: Final = ("stage", "topic", "group", "broker", "host")


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The files that were written, and the most important sums."""

    messages: int
    sends: int
    deliveries: int
    failed_deliveries: int
    unfinished: int
    """Deliveries whose end nobody reported."""
    written: list[Path] = field(default_factory=list)


def spans(found: DataFrame) -> DataFrame:
    """A row for each send and each delivery; a delivery also has the topic, broker, birth and storing of its send."""
    sent = (
        found.where(F.col("kind") == SEND)
        .select("message_id", "time", "group", "host", "topic", "tags", "keys", "broker", "bytes", "millis", "success")
        .dropDuplicates()
    )
    send = sent.withColumns({"kind": F.lit(SEND), "born": F.col("time"), "stored": _plus("time", "millis")})
    # A message that was sent again has one id: its first acknowledged send counts.
    first = F.struct("time", "topic", "broker", "tags", "keys", "millis")
    origin = (
        sent.where("success")
        .groupBy("message_id")
        .agg(F.min(first).alias("sent"))
        .select(
            "message_id",
            *(F.col(f"sent.{name}").alias(name) for name in ("topic", "broker", "tags", "keys")),
            F.col("sent.time").alias("born"),
            _plus("sent.time", "sent.millis").alias("stored"),
        )
    )
    return _deliveries(found).join(origin, "message_id", "left").unionByName(send, allowMissingColumns=True)


def _deliveries(found: DataFrame) -> DataFrame:
    """Begin and end of each call of a callback as one row; `success` is null when nothing says that it ended."""
    is_begin = F.col("kind") == BEGIN
    return (
        found.where(F.col("kind").isin(BEGIN, END))
        .groupBy("message_id", "request_id")
        .agg(
            F.coalesce(F.min(F.when(is_begin, F.col("time"))), F.min("time")).alias("time"),
            F.max("group").alias("group"),
            F.max("host").alias("host"),
            F.max("retries").alias("retries"),
            F.max("millis").alias("millis"),
            F.max("success").alias("success"),
            F.max("code").alias("code"),
        )
        .withColumn("kind", F.lit("delivery"))
    )


def _plus(moment: str, millis: str) -> Column:
    return F.timestamp_millis(F.unix_millis(moment) + F.coalesce(F.col(millis), F.lit(0)))


def _between(begin: Column, end: Column) -> Column:
    return F.unix_millis(end) - F.unix_millis(begin)


def stages(found: DataFrame) -> DataFrame:
    """A row for each stage of each span: when it began, its milliseconds, whether it failed."""
    is_send = F.col("kind") == SEND
    end = _plus("time", "millis")
    ended = ~is_send & F.col("success").isNotNull()
    first = ~is_send & (F.coalesce(F.col("retries"), F.lit(0)) == 0)

    def stage(name: str, counts: Column, millis: Column, failed: Column) -> Column:
        return F.when(counts, F.struct(F.lit(name).alias("stage"), millis.alias("millis"), failed.alias("failed")))

    fine = F.lit(False)
    every = F.array(
        stage("stored", is_send, F.col("millis"), ~F.col("success")),
        stage("waited", first & F.col("stored").isNotNull(), _between(F.col("stored"), F.col("time")), fine),
        stage("consumed", ended, F.col("millis"), ~F.col("success")),
        stage("total", ended & F.col("success") & F.col("born").isNotNull(), _between(F.col("born"), end), fine),
    )
    return found.select(
        "time", "topic", "group", "broker", "host", F.explode(F.array_compact(every)).alias("one")
    ).select("time", "topic", "group", "broker", "host", "one.*")


def latency(found: DataFrame, window: str) -> DataFrame:
    """Percentiles and failures of `stages` by window, stage, topic, group, broker and host."""
    return (
        found.groupBy(F.window("time", window).alias("span"), *BY)
        .agg(
            F.count("*").alias("count"),
            F.count_if("failed").alias("failed"),
            F.avg(F.col("failed").cast("double")).alias("failure_rate"),
            *percentiles("millis", "latency"),
        )
        .select("span.start", "span.end", "*")
        .drop("span")
    )


def slowest(found: DataFrame, most: int = SLOWEST) -> DataFrame:
    """The deliveries that ended longest after the birth of their message, slowest first."""
    end = _plus("time", "millis")
    return (
        found.where((F.col("kind") == "delivery") & F.col("born").isNotNull())
        .withColumn("total_millis", _between(F.col("born"), end))
        .orderBy(F.desc("total_millis"))
        .limit(most)
        .select("message_id", "topic", "group", "broker", "host", "keys", "tags", "born", "stored", "time", "millis")
        .withColumn("total_millis", _between(F.col("born"), end))
    )


def checked(options: Mapping[str, str], window: str) -> SourceOptions:
    """The options of the source; raises an error when they, or the window, are wrong."""
    checked_window(window)
    return parse_options(trace_options(options))


def trace(spark: SparkSession, traces: DataFrame, out: Path, *, window: str = "1 minute") -> TraceReport:
    """Write `spans`, `latency` and `slowest` as Parquet under `out`, which must not have them, and draw them."""
    checked_window(window)
    out = made_directory(out, RESULTS)
    with told_in_one_line():
        found = _written(spark, spans(events(traces)), out / "spans")
        figures = _written(spark, latency(stages(found), window).orderBy("start"), out / "latency")
        _written(spark, slowest(found).coalesce(1), out / "slowest")
        is_delivery = F.col("kind") == "delivery"
        sums = found.agg(
            F.countDistinct("message_id").alias("messages"),
            F.count_if(~is_delivery).alias("sends"),
            F.count_if(is_delivery).alias("deliveries"),
            F.count_if(is_delivery & ~F.col("success")).alias("failed"),
            F.count_if(is_delivery & F.col("success").isNull()).alias("unfinished"),
        ).first()
        pictures = draw_trace(figures, out)
    assert sums is not None
    messages, sends, deliveries, failed, unfinished = sums
    written = [out / "spans", out / "latency", out / "slowest", *pictures]
    return TraceReport(messages, sends, deliveries, failed, unfinished, written)


def _written(spark: SparkSession, frame: DataFrame, path: Path) -> DataFrame:
    frame.write.option("compression", "zstd").parquet(str(path))
    return spark.read.parquet(str(path))


def latency_stream(found: DataFrame, window: str, watermark: str) -> DataFrame:
    """`latency` of a stream of events. A window comes out when events later than its end by `watermark` were read.

    Stages `stored` and `consumed` need one event each. For `waited` and `total` the end of a delivery is joined with
    the send of its message, as long as not more than `watermark` lies between them.
    """
    # One watermark in front of all filters: Spark goes by the branch that is latest, and that of deliveries would stand
    # still when there are none. Conditions that name the time are not moved in front of the watermark.
    watched = found.withWatermark("time", watermark)
    sends = watched.where(F.when(F.col("time").isNotNull() & F.col("success"), F.col("kind")) == SEND)
    ends = watched.where(F.when(F.col("time").isNotNull(), F.col("kind")) == END)
    send, end = sends.alias("send"), ends.alias("end")
    near = (F.col("end.time") >= F.col("send.time")) & (
        F.col("end.time") <= F.col("send.time") + F.expr(f"INTERVAL {watermark}")
    )
    joined = end.join(send, (F.col("end.message_id") == F.col("send.message_id")) & near).select(
        F.lit("delivery").alias("kind"),
        F.col("end.time").alias("time"),
        *(F.col(f"send.{name}").alias(name) for name in ("topic", "broker")),
        *(F.col(f"end.{name}").alias(name) for name in ("group", "host", "retries", "millis", "success")),
        F.col("send.time").alias("born"),
        F.timestamp_millis(F.unix_millis("send.time") + F.col("send.millis")).alias("stored"),
    )
    alone = (
        watched.where(F.when(F.col("time").isNotNull(), F.col("kind")) == SEND)
        .select("kind", "time", "topic", "broker", "group", "host", "retries", "millis", "success")
        .withColumns({"born": F.col("time"), "stored": F.col("time")})
    )
    return latency(stages(joined.unionByName(alone)), window)


def stream_trace(
    spark: SparkSession,
    options: Mapping[str, str],
    out: str,
    *,
    name: str = KIND,
    window: str = "1 minute",
    watermark: str = "10 minutes",
    until_caught_up: bool = False,
    seconds_between_batches: float = 10.0,
    on_progress: Callable[[int, int | None], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Append windows of `latency_stream` to Parquet files in `out`, a directory or URL; returns trace messages read.

    Progress is kept in `out/_checkpoint`, shown as the group `trace_<name>` and told to `downrange pipeline list`.
    """
    source = {"startingOffsets": "earliest", **options, "group": f"trace_{name}", "commitGroupOffsets": "true"}
    wanted = checked(source, window)
    checked_window(watermark)
    stop, out = stop or threading.Event(), place(out)
    reporter = PipelineReporter(wanted.client_config())
    told = PipelineStatus(name, KIND, wanted.choice, out)
    with told_in_one_line():
        traces = trace_frame(spark, source, streaming=True)
        writer = (
            latency_stream(events(traces), window, watermark)
            .writeStream.format("parquet")
            .queryName(name)
            .option("path", f"{out}/latency")
            .option("checkpointLocation", f"{out}/_checkpoint")
        )
        pause = f"{round(seconds_between_batches * 1000)} milliseconds"
        query = (writer.trigger(availableNow=True) if until_caught_up else writer.trigger(processingTime=pause)).start()
        read, seen = 0, -1
        try:
            ended = False
            while not ended and not stop.is_set():
                with told_in_one_line():
                    ended = bool(query.awaitTermination(1))
                last: Any = None
                for last in query.recentProgress:
                    if last.batchId > seen:
                        seen = last.batchId
                        read += last.numInputRows // BRANCHES
                if last is not None:
                    lag = lag_of(last)
                    status = status_of(last, lag)
                    rate = None if status.rows_per_second is None else status.rows_per_second / BRANCHES
                    told = replace(told, lag=status.lag, rows_per_second=rate, batch_seconds=status.batch_seconds)
                    reporter.tell(told)
                    if on_progress is not None:
                        on_progress(read, None if lag is None else lag.messages)
        except Exception as error:
            reporter.tell_error(told, error)
            raise
        finally:
            query.stop()
            reporter.close()
    return read
