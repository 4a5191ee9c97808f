"""Writes the messages of a task into Parquet files, one for each topic and day."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from downrange.model.message import MessageQueue
from downrange.spark.arrow_arrays import as_numpy
from downrange.spark.lake.layout import LakeError, LakeFile, file_name
from downrange.spark.lake.location import Location
from downrange.spark.lake.parquet_file import ParquetFile
from downrange.spark.planner import QueueRange

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
MAX_BUFFERED_BYTES: Final = 128 * 1024 * 1024
"""Bytes that all files of one writer together may gather before they are written."""
_NEEDED: Final = ("topic", "broker", "queue_id", "queue_offset", "store_time")
_DAY_MICROS: Final = 86_400_000_000


class _Part(NamedTuple):
    topic: str
    date: str


class _OpenFile(NamedTuple):
    """A file that is being written, and the messages of each queue in it."""

    file: ParquetFile
    queues: dict[MessageQueue, QueueRange]

    def add(self, queue: MessageQueue, rows: pa.RecordBatch) -> None:
        offsets = rows.column("queue_offset")
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        known = self.queues.get(queue)
        self.queues[queue] = QueueRange(queue, first if known is None else known.start, last + 1)
        # Readers take the topic from the log; a column of that name would confuse some of them.
        self.file.add(rows.drop_columns("topic"))

    def close(self) -> LakeFile:
        return self.file.close()._replace(queues=tuple(self.queues.values()))


class LakeWriter:
    """Writes messages into new files, which count only after `Lake.commit_batch`.

    Belongs to one task. Batches have columns of a message in any order; those for topic, broker, queue, offset and
    store time are needed. A batch has messages of one queue, and those of a queue come in the order of their offsets.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: dict[_Part, _OpenFile] = {}
        self._buffered_bytes = 0
        self._done: list[LakeFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        queue = _queue_of(batch)
        for date, rows in _days(batch):
            part = _Part(queue.topic, date)
            target = self._open.get(part)
            if target is None:
                name = file_name(queue.broker_name, queue.queue_id, rows.column("queue_offset")[0].as_py())
                file = ParquetFile(self._location, part.topic, part.date, name)
                target = self._open[part] = _OpenFile(file, {})
            before = target.file.buffered_bytes
            target.add(queue, rows)
            self._buffered_bytes += target.file.buffered_bytes - before
            if target.file.written_bytes >= MAX_FILE_BYTES:
                self._buffered_bytes -= target.file.buffered_bytes
                self._done.append(self._open.pop(part).close())
        while self._buffered_bytes > MAX_BUFFERED_BYTES:
            largest = max((target.file for target in self._open.values()), key=lambda file: file.buffered_bytes)
            self._buffered_bytes -= largest.buffered_bytes
            largest.write_row_group()

    def finish(self) -> list[LakeFile]:
        """Finish all files; they are safe when this returns."""
        for target in self._open.values():
            target.file.write_row_group()
        while self._open:
            self._done.append(self._open.pop(next(iter(self._open))).close())
        return self._done

    def discard(self) -> None:
        """Remove all files: the task failed."""
        for target in self._open.values():
            target.file.discard()
        for file in self._done:
            self._location.remove(file.path)


def _queue_of(batch: pa.RecordBatch) -> MessageQueue:
    """The queue of all messages of a batch."""
    if missing := [name for name in _NEEDED if name not in batch.schema.names]:
        raise LakeError(f"messages for the lake need the columns {', '.join(missing)}")
    topic, broker, queue_id = (batch.column(name) for name in ("topic", "broker", "queue_id"))
    ids = as_numpy(queue_id)
    if (ids != ids[0]).any() or topic[0] != topic[-1] or broker[0] != broker[-1]:
        raise LakeError("a batch for the lake has messages of several queues")
    return MessageQueue(topic[0].as_py(), broker[0].as_py(), int(ids[0]))


def _days(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Cut the batch where the day of the store time changes, into slices without copying."""
    days = np.floor_divide(as_numpy(batch.column("store_time").cast(pa.int64())), _DAY_MICROS)
    bounds = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for start, end in pairwise(bounds):
        yield str(np.datetime64(int(days[start]), "D")), batch.slice(start, end - start)
