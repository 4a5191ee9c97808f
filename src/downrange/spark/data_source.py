"""The data source `rocketmq`, the only class that Spark knows by name. Readers are in source.py, writers in sink.py."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cached_property

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from downrange.model.errors import MQError
from downrange.spark.errors import SchemaMismatch, one_line_errors
from downrange.spark.frozen_imports import freeze_imports
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.schema import COLUMNS, PROPERTIES, message_schema


class RocketMQDataSource(DataSource):
    """`spark.read.format("rocketmq")`, and readStream, write and writeStream. Spark makes one for each DataFrame."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        freeze_imports()  # also for the processes that only plan a read, or make a writer for every micro-batch

    @classmethod
    def name(cls) -> str:
        return "rocketmq"

    def schema(self) -> StructType:
        with one_line_errors():
            return message_schema(include_properties=self._source_options.include_properties)

    def reader(self, schema: StructType) -> DataSourceReader:
        from downrange.spark.source import BatchReader, FilteringBatchReader

        with one_line_errors():
            options = self._source_options
            kind = FilteringBatchReader if options.push_down_filters else BatchReader
            return kind(options, arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        from downrange.spark.source import BrokenStream, StreamReader

        try:
            return StreamReader(self._source_options, arrow_schema(schema))
        except MQError as error:
            return BrokenStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from downrange.spark import sink

        with one_line_errors():
            return sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from downrange.spark import sink

        with one_line_errors():
            return sink.stream_writer(self.options, schema, overwrite)

    @cached_property
    def _source_options(self) -> SourceOptions:
        """Parsed only when Spark asks for a reader: writers have other options."""
        return parse_options(self.options)


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema of the batches; raises SchemaMismatch for a schema that is not made of our columns."""
    known = {**COLUMNS, "properties": PROPERTIES}
    if not schema.fields:
        raise SchemaMismatch(f"the schema has no column; there are {', '.join(known)}")
    for column in schema.fields:
        expected = known.get(column.name)
        if expected is None:
            raise SchemaMismatch(f"no column {column.name}; there are {', '.join(known)}")
        if column.dataType != expected:
            raise SchemaMismatch(
                f"column {column.name} is {expected.simpleString()}, not {column.dataType.simpleString()}"
            )
    if len(set(schema.names)) != len(schema.names):
        raise SchemaMismatch("the schema names a column twice")
    return to_arrow_schema(schema, timezone="UTC")
