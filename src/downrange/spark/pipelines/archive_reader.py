"""The reader of an archive, whose tasks write files of the lake instead of giving rows to Spark.

Passing a row through the JVM costs more than writing it to Parquet. So a task reads its ranges, writes them, and tells
the driver which files it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from downrange.model.subscription import parse_tags
from downrange.spark import planner
from downrange.spark.cluster import Cluster
from downrange.spark.data_source import arrow_schema
from downrange.spark.lake.layout import LakeFile
from downrange.spark.lake.location import Location
from downrange.spark.lake.writer import LakeWriter
from downrange.spark.offset_resolution import Origins
from downrange.spark.offsets import Tree, from_json, next_offset, to_json
from downrange.spark.options import SourceOptions
from downrange.spark.planner import QueueRange
from downrange.spark.schema import message_schema
from downrange.spark.source import StreamReader, Task
from downrange.spark.worker_loop import WorkerLoop

# Starting a second task costs about as much as archiving this many messages.
_WORTH_A_TASK: Final = 20_000


class ArchiveReader(StreamReader):
    """Plans the batches of an archive, on the driver and in one thread; `write` runs on copies, on workers."""

    def __init__(self, options: SourceOptions, lake: Location, parallelism: int) -> None:
        super().__init__(options, arrow_schema(message_schema(include_properties=options.include_properties)))
        self._lake = lake
        self._parallelism = parallelism
        self._loop: WorkerLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_loop": None}

    def _origins(self) -> Origins:
        if self._options.store_path is not None:
            return super()._origins()
        # Not the loop of the process: another thread may run another archive.
        self._loop = WorkerLoop()
        return Cluster(self._options, self._loop)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = self._opened = None

    def first_offset(self, ends: Tree) -> dict[str, Any]:
        """The first offset of an archive without a position: behind messages that another archive put into the lake."""
        start = from_json(self.initialOffset())
        return to_json({queue: max(offset, next_offset(ends, queue)) for queue, offset in start.items()})

    def behind(self, end: dict[str, Any]) -> int:
        """The number of messages behind `end` when `latestOffset` was last called."""
        return 0 if self._latest is None else planner.waiting(from_json(end), self._latest)

    def _tasks(self, ranges: Sequence[QueueRange]) -> list[Task]:
        options = self._options
        worth = sum(one.size for one in ranges) // _WORTH_A_TASK
        at_least = options.min_partitions or max(1, min(self._parallelism, worth))
        found = planner.tasks(ranges, most=options.max_records_per_partition, at_least=at_least)
        return [Task(part, parse_tags(options.tags)) for part in found]

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
