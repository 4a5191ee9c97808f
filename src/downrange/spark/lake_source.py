"""Lakes in object stores as DataFrames, without a jar for the object store.

Spark reads files of a local lake itself. For others, tasks read them with the library that wrote the table's log, and
leave out files and row groups that cannot match the filters of the query.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from datetime import date as _date
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import DateType, StructField, StructType

from downrange.spark.errors import one_line_errors
from downrange.spark.lake.layout import LakeFile
from downrange.spark.lake.location import Location, storage_errors
from downrange.spark.schema import message_schema

if TYPE_CHECKING:
    import pyarrow.dataset

NAME: Final = "downrange_lake"
_STORAGE: Final = "storage."
_TASK_BYTES: Final = 32 * 1024 * 1024
_COMPARED: Final[dict[type[Filter], Callable[[Any, Any], Any]]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def lake_schema() -> StructType:
    """The columns of a lake: those of a message, and its day."""
    return StructType([*message_schema(include_properties=True), StructField("date", DateType())])


def remote_frame(spark: SparkSession, location: Location, version: int, columns: Sequence[str] | None) -> DataFrame:
    """Messages of one version of a lake; only these columns, all unless given."""
    spark.dataSource.register(LakeSource)
    options = {
        "url": location.url,
        "version": str(version),
        "pushFilters": str(spark.conf.get("spark.sql.python.filterPushdown.enabled", "false")),
        **{f"{_STORAGE}{name}": value for name, value in location.storage_options.items()},
    }
    wanted = lake_schema().names if columns is None else columns
    schema = StructType([field for field in lake_schema() if field.name in wanted])
    return spark.read.format(NAME).options(**options).schema(schema).load()


@dataclass(frozen=True, slots=True)
class _Files(InputPartition):
    """The files of one task, as path, topic and date."""

    files: tuple[tuple[str, str, str], ...]


class LakeSource(DataSource):
    """`downrange_lake`, for `remote_frame` only."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def reader(self, schema: StructType) -> DataSourceReader:
        # Names of options are not case sensitive in Spark; those of object stores are not either.
        storage = {
            name.removeprefix(_STORAGE): value for name, value in self.options.items() if name.startswith(_STORAGE)
        }
        kind = FilteringLakeReader if self.options["pushfilters"] == "true" else LakeReader
        location = Location(self.options["url"], storage)
        return kind(location, int(self.options["version"]), schema.names)


class LakeReader(DataSourceReader):
    """Plans a read on the driver; `read` runs on copies, on workers."""

    def __init__(self, location: Location, version: int, columns: Sequence[str]) -> None:
        self._location = location
        self._version = version
        self._columns = list(columns)
        self._filters: list[tuple[str, Filter]] = []

    def partitions(self) -> Sequence[InputPartition]:
        from downrange.spark.lake.log import files_of, table_at

        with one_line_errors(), storage_errors(self._location):
            table = table_at(self._location, self._version)
            dataset = table.to_pyarrow_dataset(filesystem=self._location.filesystem())
            chosen = {fragment.path for fragment in dataset.get_fragments(self._expression())}
            files = [file for file in files_of(table) if file.path in chosen]
        return [_Files(tuple((file.path, file.topic, file.date) for file in part)) for part in _tasks(files)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow.dataset

        from downrange.spark.lake.log import SCHEMA

        if not isinstance(partition, _Files):  # Spark passes something else if there is nothing to read
            return
        with one_line_errors(), storage_errors(self._location):
            fragments = [self._fragment(*file) for file in partition.files]
            parquet = pyarrow.dataset.ParquetFileFormat()
            dataset = pyarrow.dataset.FileSystemDataset(fragments, SCHEMA, parquet, self._location.filesystem())
            yield from dataset.to_batches(self._columns, self._expression())

    def _fragment(self, path: str, topic: str, date: str) -> pyarrow.dataset.Fragment:
        from pyarrow.dataset import ParquetFileFormat, field

        known = (field("topic") == topic) & (field("date") == _date.fromisoformat(date))
        return ParquetFileFormat().make_fragment(path, self._location.filesystem(), known)

    def _expression(self) -> pyarrow.dataset.Expression | None:
        """The filters of the query, as far as they help to leave out files."""
        found = None
        for name, one in self._filters:
            part = _compared(name, one)
            found = part if found is None else found & part
        return found


class FilteringLakeReader(LakeReader):
    """A LakeReader that uses the filters of the query to read less. Spark checks every row again."""

    def pushFilters(self, filters: list[Any]) -> Any:  # noqa: N802  Spark's name
        for one in filters:
            attribute: tuple[str, ...] = getattr(one, "attribute", ())
            if len(attribute) == 1 and (type(one) in _COMPARED or isinstance(one, In)):
                self._filters.append((attribute[0], one))
        return filters


def _compared(name: str, one: Any) -> pyarrow.dataset.Expression:
    import pyarrow.dataset

    column = pyarrow.dataset.field(name)
    if isinstance(one, In):
        return column.isin([_value(value) for value in one.value if value is not None])
    return _COMPARED[type(one)](column, _value(one.value))


def _value(value: Any) -> Any:
    """Spark passes a time without a zone as UTC."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def _tasks(files: Sequence[LakeFile]) -> Iterator[list[LakeFile]]:
    """The files in tasks of about `_TASK_BYTES`."""
    part: list[LakeFile] = []
    for file in files:
        if part and sum(one.bytes for one in part) + file.bytes > _TASK_BYTES:
            yield part
            part = []
        part.append(file)
    if part:
        yield part
