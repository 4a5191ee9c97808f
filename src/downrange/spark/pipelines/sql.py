"""Spark SQL queries over topics, store directories and lakes, each of which is a view."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from downrange.spark.lake.lake import Lake
from downrange.spark.lake_source import lake_schema
from downrange.spark.options import parse_options
from downrange.spark.pipelines.errors import PipelineError, told_in_one_line
from downrange.spark.pipelines.frames import columns_named_in, lake_frame, topic_frame
from downrange.spark.source import check_source

_VIEW: Final = re.compile(r"[A-Za-z_]\w*")
_DELAY: Final = re.compile(r"\d+ (second|minute|hour|day)s?")


class ViewKind(Enum):
    """The kinds of places that a view of a query reads messages from."""

    TOPIC = "topic"
    STORE = "store"
    LAKE = "lake"


@dataclass(frozen=True, slots=True)
class View:
    """A name in the query and its source: a topic, the directory of a store, or the place of a lake."""

    name: str
    kind: ViewKind
    value: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """More options of the source, for topics and stores; storage options for lakes."""

    def __post_init__(self) -> None:
        if not _VIEW.fullmatch(self.name):
            raise PipelineError(f"{self.name!r} cannot be a view: expected letters, digits and '_'; name it VIEW=…")
        if self.kind is ViewKind.STORE and not Path(self.value).is_dir():
            raise PipelineError(f"{self.value} is not a store directory")

    def check(self) -> None:
        """Raise the error with which a read would begin; Spark need not run for that."""
        if self.kind is ViewKind.LAKE:
            Lake.open(self.value, self.options)
        else:
            check_source(parse_options(self._source()))

    def _source(self) -> dict[str, str]:
        """The options of the source of a topic or a store."""
        if self.kind is ViewKind.TOPIC:
            return {**self.options, "subscribe": self.value}
        chosen = {"storePath": str(Path(self.value).absolute())}
        if not {"subscribe", "subscribePattern", "assign"} & set(self.options):
            chosen["subscribePattern"] = ".*"
        return {**self.options, **chosen}

    def frame(self, spark: SparkSession, query: str, *, streaming: bool) -> DataFrame:
        """The messages of the source, with the columns that the query may need."""
        if self.kind is ViewKind.LAKE:
            columns = columns_named_in(query, lake_schema().names)
            return lake_frame(spark, Lake.open(self.value, self.options), columns=columns)
        return topic_frame(spark, self._source(), columns_named_in(query), streaming=streaming)


def parse_view(text: str, kind: ViewKind, options: Mapping[str, str]) -> View:
    """Parse `VALUE` or `VIEW=VALUE`. The default name is the topic, or `store` or `lake` for a directory."""
    name, equals, value = text.partition("=")
    if not equals:
        value = text
        name = re.sub(r"\W", "_", text) if kind is ViewKind.TOPIC else kind.value
    return View(name, kind, value, options)


def checked_watermark(delay: str | None) -> None:
    """Raise an error when `delay` is not a length of time."""
    if delay is not None and not _DELAY.fullmatch(delay):
        raise PipelineError(f"watermark {delay!r}: expected a number and second, minute, hour or day: `10 seconds`")


def sql(
    spark: SparkSession,
    query: str,
    views: Sequence[View],
    *,
    streaming: bool = False,
    watermark: str | None = None,
) -> DataFrame:
    """The result of a query over the views. In a streaming query topics are streams; lakes stay as they are now.

    With `watermark`, a stream waits so long for messages with an earlier `store_time`; windows behind it are complete.
    """
    checked_watermark(watermark)
    if len({view.name for view in views}) < len(views):
        raise PipelineError("two views have the same name: name them VIEW=…")
    with told_in_one_line():
        for view in views:
            is_stream = streaming and view.kind is not ViewKind.LAKE
            frame = view.frame(spark, query, streaming=is_stream)
            if is_stream and watermark is not None and "store_time" in frame.columns:
                frame = frame.withWatermark("store_time", watermark)
            frame.createOrReplaceTempView(view.name)
        result = spark.sql(query)
        if streaming and not result.isStreaming:
            raise PipelineError("the query reads no stream: give it a topic or a store, or leave out --stream")
        return result


def write_parquet(result: DataFrame, path: Path) -> None:
    if path.exists():
        raise PipelineError(f"{path} is there already")
    with told_in_one_line():
        result.write.option("compression", "zstd").parquet(str(path.absolute()))


def start_stream(
    result: DataFrame,
    *,
    on_rows: Callable[[DataFrame], None] | None,
    path: Path | None = None,
    output_mode: str = "append",
    until_caught_up: bool = False,
    name: str | None = None,
) -> StreamingQuery:
    """Pass each batch to `on_rows`, or append it to Parquet in `path`, with the checkpoint beside it.

    `name` is the name of the query in Spark, and in what a LagListener tells.
    """
    writer = result.writeStream.outputMode(output_mode)
    if name is not None:
        writer = writer.queryName(name)
    if until_caught_up:
        writer = writer.trigger(availableNow=True)
    with told_in_one_line():
        if path is not None:
            path = path.absolute()
            checkpoint = path.with_name(f"{path.name}.checkpoint")
            return writer.format("parquet").option("checkpointLocation", str(checkpoint)).start(str(path))
        assert on_rows is not None
        return writer.foreachBatch(lambda rows, _: on_rows(rows)).start()


def json_row(row: Any) -> str:
    """One row as one line of JSON, with bytes that are not text in hexadecimal."""
    return json.dumps(row.asDict(recursive=True), default=plain, ensure_ascii=False)


def plain(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return bytes(value).hex()
    return str(value)
