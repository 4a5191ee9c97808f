"""The reader of an archive, whose tasks write files of the lake and tell the driver which files they wrote."""

from __future__ import annotations

from typing import Any

from pyspark.sql.datasource import InputPartition

from downrange.spark.data_source import arrow_schema
from downrange.spark.lake.layout import LakeFile
from downrange.spark.lake.location import Location
from downrange.spark.lake.writer import LakeWriter
from downrange.spark.offsets import Tree, from_json, next_offset, to_json
from downrange.spark.options import SourceOptions
from downrange.spark.pipelines.task_reader import TaskReader
from downrange.spark.schema import message_schema


class ArchiveReader(TaskReader):
    """Plans the batches of an archive, on the driver and in one thread; `write` runs on copies, on workers."""

    def __init__(self, options: SourceOptions, lake: Location, parallelism: int) -> None:
        super().__init__(options, arrow_schema(message_schema(include_properties=options.include_properties)))
        self.parallelism = parallelism
        self._lake = lake

    def first_offset(self, ends: Tree) -> dict[str, Any]:
        """The first offset of an archive without a position: behind messages that another archive put into the lake."""
        start = from_json(self.initialOffset())
        return to_json({queue: max(offset, next_offset(ends, queue)) for queue, offset in start.items()})

    def write(self, task: InputPartition) -> list[LakeFile]:
        """Runs on a worker: write the messages of a task into files, which count when the lake commits them."""
        writer = LakeWriter(self._lake)
        try:
            for batch in self.read(task):
                writer.add(batch)
            return writer.finish()
        except BaseException:
            writer.discard()
            raise
