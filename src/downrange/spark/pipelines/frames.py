"""Topics, store directories and lakes as DataFrames with the columns of a message."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DateType, StructField, StructType

from downrange.spark.lake.lake import Lake
from downrange.spark.options import parse_options
from downrange.spark.schema import message_schema

Options = Mapping[str, str]


def columns_named_in(query: str) -> tuple[str, ...] | None:
    """Columns that a query may need; None for all. Spark does not tell our source, which reads few columns faster."""
    text = re.sub(r"\(\s*\*\s*\)", "()", query.lower())  # count(*) needs no column
    words = set(re.findall(r"\w+", text))
    if "*" in text or "natural" in words:
        return None
    return tuple(name for name in message_schema(include_properties=True).names if name in words) or ("queue_offset",)


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
) -> DataFrame:
    """Messages of the files in the manifest of a lake, with the column `date`.

    `begin_millis` and `end_millis` choose files; files at the edges also have messages outside of the span.
    """
    with contextlib.suppress(PermissionError):  # a user who may only read leaves repairs to others
        lake.settle()
    paths = [str(lake.root / file.path) for file in lake.files(topics, begin_millis, end_millis)]
    return paths_frame(spark, lake.root, paths)


def paths_frame(spark: SparkSession, root: Path, paths: Sequence[str]) -> DataFrame:
    # The schema is given because Spark would take a topic named 2026 for a number, and open every file.
    schema = StructType([*message_schema(include_properties=True), StructField("date", DateType())])
    if not paths:
        return spark.createDataFrame([], schema)
    frame = spark.read.schema(schema).option("basePath", str(root)).parquet(*paths)
    return frame.select(*schema.names)
