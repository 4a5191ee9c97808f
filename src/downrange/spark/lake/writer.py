"""Writes messages into Parquet files, one for each queue and day."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from downrange.spark.arrow_arrays import as_numpy
from downrange.spark.lake.layout import LakeError, LakeFile, file_name
from downrange.spark.lake.location import Location
from downrange.spark.lake.parquet_file import ParquetFile

MAX_FILE_BYTES: Final = 256 * 1024 * 1024
MAX_BUFFERED_BYTES: Final = 128 * 1024 * 1024
"""Bytes that all files of one writer together may gather before they are written."""
_NEEDED: Final = ("topic", "broker", "queue_id", "queue_offset", "store_time")
_DAY_MICROS: Final = 86_400_000_000
# If runs have fewer rows than this, sorting a batch costs less than cutting it.
_SHORT_RUN: Final = 16


class _Part(NamedTuple):
    topic: str
    date: str
    broker: str
    queue_id: int


class LakeWriter:
    """Writes messages into new files, which count only after `Lake.commit_batch`.

    Belongs to one task. Batches have columns of a message in any order; those for topic, broker, queue, offset and
    store time are needed. Rows of one queue come in the order of their offsets.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._open: dict[_Part, ParquetFile] = {}
        self._done: list[LakeFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        for part, rows in _parts(batch):
            target = self._open.get(part)
            if target is None:
                name = file_name(part.broker, part.queue_id, rows.column("queue_offset")[0].as_py())
                target = self._open[part] = ParquetFile(self._location, part.topic, part.date, name)
            # Readers take the topic from the log; a column of that name would confuse some of them.
            target.add(rows.drop_columns("topic"))
            if target.written_bytes >= MAX_FILE_BYTES:
                self._done.append(self._open.pop(part).close())
        while sum(target.buffered_bytes for target in self._open.values()) > MAX_BUFFERED_BYTES:
            max(self._open.values(), key=lambda target: target.buffered_bytes).write_row_group()

    def finish(self) -> list[LakeFile]:
        """Finish all files; they are safe when this returns."""
        for target in self._open.values():
            target.write_row_group()
        while self._open:
            self._done.append(self._open.pop(next(iter(self._open))).close())
        return self._done

    def discard(self) -> None:
        """Remove all files: the task failed."""
        for target in self._open.values():
            target.discard()
        for file in self._done:
            self._location.remove(file.path)


def _parts(batch: pa.RecordBatch) -> Iterator[tuple[_Part, pa.RecordBatch]]:
    """Cut the batch where topic, broker, queue or day change, into slices without copying."""
    if missing := [name for name in _NEEDED if name not in batch.schema.names]:
        raise LakeError(f"messages for the lake need the columns {', '.join(missing)}")
    if batch.num_rows == 0:
        return
    bounds = _run_bounds(batch)
    if len(bounds) > 2 and batch.num_rows < _SHORT_RUN * len(bounds):
        batch = batch.sort_by([("topic", "ascending"), ("broker", "ascending"), ("queue_id", "ascending"),
                               ("queue_offset", "ascending")])  # fmt: skip
        bounds = _run_bounds(batch)
    topic, broker, queue_id = (batch.column(name) for name in ("topic", "broker", "queue_id"))
    days = _days(batch)
    for start, end in pairwise(bounds):
        date = str(np.datetime64(int(days[start]), "D"))
        part = _Part(topic[start].as_py(), date, broker[start].as_py(), queue_id[start].as_py())
        yield part, batch.slice(start, end - start)


def _run_bounds(batch: pa.RecordBatch) -> list[int]:
    """The first row of each run of equal (topic, broker, queue, day), and the number of rows."""
    ends = [as_numpy(pc.run_end_encode(batch.column(name)).run_ends) for name in ("topic", "broker", "queue_id")]
    ends.append(np.flatnonzero(np.diff(_days(batch))) + 1)
    return [0, *(int(end) for end in np.unique(np.concatenate(ends)) if 0 < end < batch.num_rows), batch.num_rows]


def _days(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    micros: np.ndarray[tuple[int], np.dtype[np.int64]] = as_numpy(batch.column("store_time").cast(pa.int64()))
    return np.floor_divide(micros, _DAY_MICROS)
