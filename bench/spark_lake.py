"""Looking for a key in a lake: bytes read before a compaction and after it; and the time of a commit.

A day of one topic, archived in batches; each message has one of a hundred thousand keys, at random. The reader is
Arrow's, which skips files by the log of the table and row groups by their statistics.
"""

from __future__ import annotations

import io
import random
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from bench.report import QUICK, Figure
from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.writer import LakeWriter

BATCHES: Final = 24
QUEUES: Final = 4
ROWS: Final = 1_000 if QUICK else 10_000
"""Messages of a queue in a batch."""
KEYS: Final = 100_000
TARGET_BYTES: Final = (4 if QUICK else 32) * 1024 * 1024
COMMITS: Final = 20 if QUICK else 200
_BEGIN: Final = datetime(2026, 11, 15, tzinfo=UTC)


class _CountedFile(io.FileIO):
    """A file that counts the bytes read from it."""

    def __init__(self, path: str, counter: list[int]) -> None:
        super().__init__(path)
        self._counter = counter

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._counter[0] += len(data)
        return data


class _CountingHandler(pyarrow.fs.FSSpecHandler):  # type: ignore[misc]
    """The files of a local lake, with the number of bytes that were read."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self.read = [0]

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_CountedFile(f"{self._lake.location}/{path}", self.read), mode="r")

    def get_file_info(self, paths: list[str]) -> list[pyarrow.fs.FileInfo]:
        found: list[pyarrow.fs.FileInfo] = self._lake.location.filesystem().get_file_info(paths)
        return found


def run() -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="downrange-bench-") as directory:
        lake = Lake.create(f"{directory}/lake")
        chance = random.Random(1)
        for batch in range(BATCHES):
            writer = LakeWriter(lake.location)
            for queue_id in range(QUEUES):
                writer.add(_messages(chance, batch, queue_id))
            lake.commit_batch("bench", batch, writer.finish(), {})
        keys = [f"customer-{chance.randrange(KEYS):06}" for _ in range(5)]
        before = _bytes_read(lake, keys)
        stored = sum(file.bytes for file in lake.files())
        began = time.perf_counter()
        compact(lake, target_bytes=TARGET_BYTES)
        seconds = time.perf_counter() - began
        after = _bytes_read(lake, keys)
        rows = BATCHES * QUEUES * ROWS
        yield Figure(f"a key of {rows:,} messages ({stored / 1e6:,.0f} MB), as archived", before / 1e6, "MB")
        yield Figure("a key after a compaction", after / 1e6, "MB", after / before, "as archived")
        yield Figure("compaction", rows / seconds, "rows/s")
        yield Figure("files after it, MB", sum(file.bytes for file in lake.files()) / 1e6, "MB")
        yield from _commits(lake)


def _messages(chance: random.Random, batch: int, queue_id: int) -> pa.RecordBatch:
    first = batch * ROWS
    times = [_BEGIN + timedelta(hours=batch, milliseconds=number) for number in range(ROWS)]
    return pa.RecordBatch.from_pydict(
        {
            "topic": ["orders"] * ROWS,
            "broker": ["broker-a"] * ROWS,
            "queue_id": pa.array([queue_id] * ROWS, pa.int32()),
            "queue_offset": pa.array(range(first, first + ROWS), pa.int64()),
            "keys": [f"customer-{chance.randrange(KEYS):06}" for _ in range(ROWS)],
            "tags": [f"tag{number % 5}" for number in range(ROWS)],
            "body": [chance.randbytes(50).hex().encode() for _ in range(ROWS)],
            "store_time": pa.array(times, pa.timestamp("us", "UTC")),
        }
    )


def _bytes_read(lake: Lake, keys: list[str]) -> float:
    """Bytes read for one key, on average."""
    total = 0
    for key in keys:
        handler = _CountingHandler(lake)
        dataset = lake.table.to_pyarrow_dataset(filesystem=pyarrow.fs.PyFileSystem(handler))
        found = dataset.to_table(filter=ds.field("keys") == key)
        assert pc.all(pc.equal(found["keys"], key)).as_py()
        total += handler.read[0]
    return total / len(keys)


def _commits(lake: Lake) -> Iterator[Figure]:
    taken = []
    for number in range(COMMITS):
        writer = LakeWriter(lake.location)
        for queue_id in range(QUEUES):
            rows = _messages(random.Random(number), BATCHES, queue_id).slice(0, 1)
            offset = pa.array([(BATCHES + number) * ROWS], pa.int64())
            writer.add(rows.set_column(rows.schema.get_field_index("queue_offset"), "queue_offset", offset))
        files = writer.finish()
        began = time.perf_counter()
        lake.commit_batch("bench", BATCHES + number, files, {})
        taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    for share in (50, 99):
        yield Figure(f"commit of a file, synced, p{share}", taken[len(taken) * share // 100], "ms")


if __name__ == "__main__":
    from bench.report import table

    print(table(run()))
