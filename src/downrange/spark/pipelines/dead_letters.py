"""The dead letters of all groups as a table, with a report and pictures.

`letters` and `deliveries` are functions from DataFrame to DataFrame; `dlq` collects, counts, writes and draws.
The table is a lake in the directory of the report: an archive of the topics `%DLQ%…`, so that every letter is in it
once, and stays there when a broker has deleted it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from downrange.client.trace import ENTRY_END, FIELD_SEPARATOR, ConsumeCode
from downrange.model import properties as names
from downrange.model.topics import DLQ_PREFIX, RETRY_PREFIX, TRACE_TOPIC
from downrange.spark.errors import OptionError
from downrange.spark.lake.lake import Lake
from downrange.spark.pipelines.archive import ArchiveProgress, archive, checked
from downrange.spark.pipelines.errors import told_in_one_line
from downrange.spark.pipelines.frames import lake_frame, topic_frame
from downrange.spark.pipelines.plots import draw_letters

NAME: Final = "dlq"
TABLE: Final = "letters"
_CHOICE: Final = {"subscribePattern": f"{DLQ_PREFIX}.*"}
_OTHER_CHOICES: Final = frozenset({"subscribe", "subscribepattern", "assign", "storepath"})
_CAUSE: Final = ("consumer_group", "origin_topic", "tags", "consumer_host", "error")
_WINDOWS: Final = {60: "1 minute", 600: "10 minutes", 3600: "1 hour"}
_MOST_WINDOWS: Final = 100
_TIMES: Final = ("since", "until")


@dataclass(frozen=True, slots=True)
class DlqReport:
    """All dead letters of the table: how many, since when, and the counts of each cause, most frequent first."""

    letters: int
    since: datetime | None
    until: datetime | None
    new: int
    causes: list[dict[str, Any]] = field(default_factory=list)
    """Rows with consumer_group, origin_topic, tags, consumer_host, error, letters, since and until."""
    written: list[Path] = field(default_factory=list)


def checked_source(options: Mapping[str, str]) -> dict[str, str]:
    """The options of the source with the choice of topics, which is ours; raises an error when they are wrong."""
    if chosen := [name for name in options if name.lower() in _OTHER_CHOICES]:
        raise OptionError(f"{chosen[0]}: this pipeline reads the dead-letter topics of all groups from brokers")
    source = {**options, **_CHOICE}
    checked(source, NAME, 1.0, kind=NAME)
    return source


def dlq(
    spark: SparkSession,
    out: Path,
    options: Mapping[str, str],
    *,
    traces: bool = True,
    on_progress: Callable[[ArchiveProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> DlqReport:
    """Bring the table in `out` up to date, and write the report and its pictures there, in place of older ones.

    `options` are those of the source `rocketmq`, without topics. If stopped, the next run continues.
    """
    source = checked_source(options)
    done = archive(spark, out / TABLE, source, name=NAME, kind=NAME, on_progress=on_progress, stop=stop)
    with told_in_one_line():
        table = letters_in(spark, out, options, traces=traces)
        table.groupBy(*_CAUSE).agg(
            F.count("*").alias("letters"), F.min("given_up").alias("since"), F.max("given_up").alias("until")
        ).coalesce(1).write.mode("overwrite").parquet(str((out / "causes").absolute()))
        causes = spark.read.parquet(str((out / "causes").absolute())).orderBy(F.desc("letters"), *_CAUSE)
        rows = [_cause(row) for row in causes.withColumns({name: F.unix_micros(name) for name in _TIMES}).collect()]
        since = min((row["since"] for row in rows), default=None)
        until = max((row["until"] for row in rows), default=None)
        written = [out / TABLE, out / "causes"]
        if since is not None and until is not None:
            plain = letters_in(spark, out, options, traces=False)
            spans = _windowed(plain, (until - since).total_seconds())
            written += draw_letters(spans, [(_title(row), row["letters"]) for row in rows], out)
    return DlqReport(sum(row["letters"] for row in rows), since, until, done.messages, rows, written)


def letters_in(spark: SparkSession, out: Path, options: Mapping[str, str], *, traces: bool = True) -> DataFrame:
    """The letters of the table in `out`, with what the trace topic says about them."""
    messages = lake_frame(spark, Lake.open(out / TABLE))
    if not traces:
        return letters(messages, None)
    # By pattern: a cluster without traces has no such topic, which is no error.
    source = {**options, "subscribePattern": TRACE_TOPIC}
    return letters(messages, topic_frame(spark, source, ("body", "born_host")))


def letters(messages: DataFrame, traces: DataFrame | None) -> DataFrame:
    """Messages of dead-letter topics with their group, first topic, and, when traced, consumer host and error."""
    found = (
        messages.withColumn("consumer_group", F.substring("topic", len(DLQ_PREFIX) + 1, 255))
        .withColumn("origin_topic", F.coalesce(F.col("properties")[names.RETRY_TOPIC], F.col("topic")))
        .withColumn("origin_topic", _popped_topic())
        .withColumn("origin_msg_id", F.coalesce(F.col("properties")[names.ORIGIN_MESSAGE_ID], F.col("msg_id")))
        .withColumnRenamed("store_time", "given_up")
    )
    if traces is None:
        nothing = F.lit(None).cast("string")
        return found.withColumns({"consumer_host": nothing, "error": nothing})
    failed = deliveries(traces).withColumnRenamed("unique_key", "traced_key")
    same = (found["unique_key"] == failed["traced_key"]) & (found["consumer_group"] == failed["traced_group"])
    return found.join(failed, same, "left").drop("traced_key", "traced_group")


def _popped_topic() -> Column:
    """What model.topics.popped_topic says of the columns origin_topic and consumer_group."""
    # Not that function itself: Spark calls Python functions by pandas, which it does not know in every release.
    topic, group = F.col("origin_topic"), F.col("consumer_group")
    prefix = F.length(group) + len(RETRY_PREFIX) + 1
    is_popped = (
        topic.startswith(F.concat(F.lit(RETRY_PREFIX), group))
        & topic.substr(prefix, F.lit(1)).isin("+", "_")
        & (F.length(topic) > prefix)
    )
    return F.when(is_popped, topic.substr(prefix + 1, F.length(topic))).otherwise(topic)


def deliveries(traces: DataFrame) -> DataFrame:
    """The last delivery of each message to each group that did not succeed: its host, and the error.

    The start of a delivery names the group, its end the error; one request number joins them.
    """
    entries = traces.select("born_host", F.explode(F.split(F.col("body").cast("string"), ENTRY_END)).alias("entry"))
    at = F.split("entry", FIELD_SEPARATOR)
    fields = entries.select("born_host", at.alias("fields"))
    kind, size = F.col("fields")[0], F.size("fields")
    begun = fields.where((kind == "SubBefore") & (size >= 8)).select(
        F.col("fields")[4].alias("request"),
        F.col("fields")[5].alias("unique_key"),
        F.col("fields")[3].alias("traced_group"),
        F.col("fields")[1].try_cast("long").alias("millis"),
        F.regexp_extract("born_host", r"^(.*?)(:\d+)?$", 1).alias("consumer_host"),
    )
    ended = fields.where((kind == "SubAfter") & (size >= 6)).select(
        F.col("fields")[1].alias("request"),
        F.col("fields")[2].alias("unique_key"),
        (F.col("fields")[4] == "true").alias("is_handled"),
        F.when(size >= 7, F.col("fields")[6].try_cast("int")).alias("code"),
    )
    words = F.create_map(*(F.lit(part) for code in ConsumeCode for part in (int(code), code.name)))
    error = F.when(F.col("is_handled").isNull(), "NO_END").otherwise(F.coalesce(words[F.col("code")], F.lit("FAILED")))
    return (
        begun.join(ended, ["request", "unique_key"], "left")
        .where(~F.coalesce("is_handled", F.lit(False)))
        .withColumn("error", error)
        .groupBy("unique_key", "traced_group")
        .agg(F.max_by(F.struct("consumer_host", "error"), F.coalesce("millis", F.lit(0))).alias("last"))
        .select("unique_key", "traced_group", "last.*")
    )


def _cause(row: Row) -> dict[str, Any]:
    """A row with its times in UTC: Spark would give those of the zone of this machine."""
    times = {name: datetime.fromtimestamp(row[name] / 1e6, UTC) for name in _TIMES}
    return {**row.asDict(), **times}


def _title(row: Mapping[str, Any]) -> str:
    named = [row[name] for name in ("consumer_group", "origin_topic", "tags", "error", "consumer_host")]
    return " · ".join(part for part in named if part)


def _windowed(table: DataFrame, seconds: float) -> DataFrame:
    """Letters by window and group; the windows are as long as it takes to draw not too many of them."""
    length = next((text for each, text in _WINDOWS.items() if seconds / each <= _MOST_WINDOWS), "1 day")
    counted = table.groupBy(F.window("given_up", length).alias("span"), "consumer_group")
    return counted.agg(F.count("*").alias("letters")).select("span.start", "span.end", "consumer_group", "letters")
