"""Topics, store directories and lakes as DataFrames with the columns of a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from downrange.spark.lake.lake import Lake
from downrange.spark.lake_source import lake_schema, remote_frame
from downrange.spark.options import parse_options
from downrange.spark.schema import message_schema

Options = Mapping[str, str]
ALL: Final = tuple(message_schema(include_properties=True).names)


def columns_named_in(query: str, known: Sequence[str] = ALL) -> tuple[str, ...] | None:
    """The known columns that a query may need; None for all. Spark does not tell sources, which read few faster."""
    text = re.sub(r"\(\s*\*\s*\)", "()", query.lower())  # count(*) needs no column
    words = set(re.findall(r"\w+", text))
    if "*" in text or "natural" in words:
        return None
    return tuple(name for name in known if name in words) or ("queue_offset",)


def place(path: str) -> str:
    """A URL, or the absolute path of a directory: Spark's own directory is another one after a chdir."""
    return path if "://" in path else str(Path(path).absolute())


def topic_frame(
    spark: SparkSession, options: Options, columns: Sequence[str] | None = None, *, streaming: bool = False
) -> DataFrame:
    """Messages of topics, over the wire or from a store directory; options are those of the source `rocketmq`."""
    given = dict(options)
    if columns is None or "properties" in columns:
        given["includeProperties"] = "true"
    parse_options(given)  # here a wrong option gives one line; from inside Spark it would give a page
    reader = spark.readStream if streaming else spark.read
    frame = reader.format("rocketmq").options(**given)
    if columns is not None:
        frame = frame.schema(chosen_schema(columns))
    return frame.load()


def chosen_schema(columns: Iterable[str]) -> StructType:
    wanted = set(columns)
    return StructType([field for field in message_schema(include_properties=True) if field.name in wanted])


def lake_frame(
    spark: SparkSession,
    lake: Lake,
    topics: Sequence[str] = (),
    begin_millis: int | None = None,
    end_millis: int | None = None,
    *,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Messages that are in a lake now, with the column `date`: of these topics, stored in this span, ends included.

    `columns` are those that are needed, all unless given; it matters for object stores, whose files Spark does not read
    itself.
    """
    # The schema is given because Spark would take a topic named 2026 for a number, and open every file.
    schema = lake_schema()
    files = lake.files(topics, begin_millis, end_millis)
    directory = lake.location.directory
    if not files:
        return spark.createDataFrame([], schema)
    if directory is None:
        frame = remote_frame(spark, lake.location, lake.table.version(), columns)
    else:
        paths = [str(directory / file.path) for file in files]
        frame = spark.read.schema(schema).option("basePath", str(directory)).parquet(*paths).select(*schema.names)
    if topics:
        frame = frame.where(F.col("topic").isin(list(topics)))
    if begin_millis is not None:
        frame = frame.where(F.col("store_time") >= F.timestamp_millis(F.lit(begin_millis)))
    if end_millis is not None:
        frame = frame.where(F.col("store_time") < F.timestamp_millis(F.lit(end_millis + 1)))
    return frame
