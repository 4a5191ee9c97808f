"""The data source behind `archive`: its tasks read messages and write them into the lake in the same worker.

What Spark sees are not messages but the files they were written to, a row each: nothing large passes through the JVM.
Offsets, planning and reading are those of `rocketmq`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StringType, StructField, StructType

from downrange.model.subscription import parse_tags
from downrange.spark import planner
from downrange.spark.arrow_arrays import strings
from downrange.spark.data_source import arrow_schema
from downrange.spark.errors import one_line_errors
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeError
from downrange.spark.lake.manifest import LakeFile
from downrange.spark.lake.writer import LakeWriter
from downrange.spark.offsets import from_json, to_json
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.planner import QueueRange
from downrange.spark.schema import message_schema
from downrange.spark.source import StreamReader, Task

FORMAT: Final = "downrange-archive"
LAKE: Final = "lake"
PIPELINE: Final = "pipeline"
PARALLELISM: Final = "parallelism"
_OWN: Final = (LAKE, PIPELINE, PARALLELISM)
_FILE: Final = pa.schema([("file", pa.string())])
# Starting a second task costs about as much as archiving this many messages.
_WORTH_A_TASK: Final = 20_000


def file_of(text: str) -> LakeFile:
    """What a row of this source says."""
    return msgspec.json.decode(text, type=LakeFile)


class ArchiveDataSource(DataSource):
    """`readStream.format("downrange-archive")`: the options of `rocketmq`, and the lake. Used by `archive` only."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return StructType([StructField("file", StringType())])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        with one_line_errors():
            return ArchiveReader(*_parsed(self.options))


def _parsed(given: MutableMapping[str, str]) -> tuple[SourceOptions, Path, str, int]:
    own = {key: value for key, value in given.items() if key.lower() in _OWN}
    if missing := [key for key in _OWN if key not in {name.lower() for name in own}]:
        raise LakeError(f"{FORMAT} needs the option {missing[0]}")
    options = parse_options({key: value for key, value in given.items() if key not in own})
    lake, name, parallelism = (value for _, value in sorted((_OWN.index(key.lower()), own[key]) for key in own))
    return options, Path(lake), name, int(parallelism)


class ArchiveReader(StreamReader):
    """A stream of messages that end in the lake. A row of a task counts when the lake commits its batch."""

    def __init__(self, options: SourceOptions, lake: Path, name: str, parallelism: int) -> None:
        super().__init__(options, arrow_schema(message_schema(include_properties=options.include_properties)))
        self._lake = lake
        self._name = name
        self._parallelism = parallelism

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Where the lake ends, if it has messages of a queue: a lost checkpoint costs nothing."""
        start = from_json(super().initialOffset())
        with one_line_errors():
            known = Lake.open(self._lake).contents()
        for queue, offset in start.items():
            start[queue] = max(offset, known.next_offset(*queue))
        return to_json(start)

    def _tasks(self, ranges: Sequence[QueueRange]) -> list[Task]:
        options = self._options
        worth = sum(one.size for one in ranges) // _WORTH_A_TASK
        at_least = options.min_partitions or max(1, min(self._parallelism, worth))
        found = planner.tasks(ranges, most=options.max_records_per_partition, at_least=at_least)
        return [Task(part, parse_tags(options.tags)) for part in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        writer = LakeWriter(self._lake, self._name)
        try:
            for batch in super().read(partition):
                writer.add(batch)
            files = writer.finish()
        except BaseException:
            writer.discard()
            raise
        if files:
            rows = strings([msgspec.json.encode(file).decode() for file in files])
            yield pa.RecordBatch.from_arrays([rows], schema=_FILE)
