"""Joins the small files of a day into a few large ones, sorted by key.

Every task of an archive writes files of its own, so that it never rewrites a file. Readers prefer large files, and a
reader who looks for a key skips the files and row groups whose smallest and largest keys exclude it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeError, LakeFile
from downrange.spark.lake.location import storage_errors
from downrange.spark.lake.parquet_file import ParquetFile

TARGET_BYTES: Final = 64 * 1024 * 1024
RUN_FILES: Final = 4
"""So many files are sorted together: their keys do not overlap."""
RUN_MEMORY: Final = 1 << 30
"""Fewer when their messages take more memory than this."""
ROW_GROUP_ROWS: Final = 32 * 1024
_ORDER: Final = [(name, "ascending") for name in ("keys", "broker", "queue_id", "queue_offset")]


class Compacted(NamedTuple):
    """The files of one run, and the number of files that they replaced."""

    files: list[LakeFile]
    replaced: int


def compact(
    lake: Lake,
    topics: Iterable[str] = (),
    *,
    target_bytes: int = TARGET_BYTES,
    on_run: Callable[[Compacted], None] | None = None,
) -> list[Compacted]:
    """Rewrite files of less than half of `target_bytes`, day by day. An archive may run at the same time."""
    if target_bytes < 1:
        raise LakeError(f"a file of {target_bytes} bytes cannot be the aim of a compaction")
    done = []
    for small in plan(lake.files(list(topics)), target_bytes):
        for old, messages in _runs(lake, small, RUN_FILES * target_bytes):
            compacted = Compacted(_sorted_files(lake, old, messages, target_bytes), len(old))
            lake.commit_compaction(old, compacted.files)
            done.append(compacted)
            if on_run is not None:
                on_run(compacted)
    return done


def plan(files: Iterable[LakeFile], target_bytes: int) -> list[list[LakeFile]]:
    """The files to join: the small files of each topic and day that has several, in the order of their store times."""
    by_partition: dict[tuple[str, str], list[LakeFile]] = {}
    for file in files:
        if file.bytes < target_bytes // 2:
            by_partition.setdefault((file.date, file.topic), []).append(file)
    return [
        sorted(small, key=lambda file: (file.low["store_time"], file.path))
        for _, small in sorted(by_partition.items())
        if len(small) > 1
    ]


def _runs(lake: Lake, small: list[LakeFile], run_bytes: int) -> Iterator[tuple[list[LakeFile], pa.Table]]:
    """Files that are sorted together, and their messages."""
    filesystem = lake.location.filesystem()
    files: list[LakeFile] = []
    tables: list[pa.Table] = []
    for file in small:
        with storage_errors(lake.location):
            tables.append(pq.read_table(file.path, filesystem=filesystem, partitioning=None))
        files.append(file)
        is_full = sum(one.bytes for one in files) >= run_bytes or sum(one.nbytes for one in tables) >= RUN_MEMORY
        if is_full or file is small[-1]:
            if len(files) > 1:
                yield files, pa.concat_tables(tables, promote_options="default")  # some files have no properties
            files, tables = [], []


def _sorted_files(lake: Lake, old: list[LakeFile], messages: pa.Table, target_bytes: int) -> list[LakeFile]:
    topic, date = old[0].topic, old[0].date
    expected = sum(file.rows for file in old)
    if messages.num_rows != expected:
        raise LakeError(f"{topic} of {date}: {messages.num_rows} rows read where the log has {expected}")
    messages = messages.sort_by([order for order in _ORDER if order[0] in messages.column_names])
    count = max(1, round(sum(file.bytes for file in old) / target_bytes))
    rows = -(-expected // count)
    return [_written(lake, topic, date, messages.slice(start, rows)) for start in range(0, expected, rows)]


def _written(lake: Lake, topic: str, date: str, messages: pa.Table) -> LakeFile:
    target = ParquetFile(lake.location, topic, date, f"compacted-{uuid.uuid4().hex}.parquet")
    for start in range(0, messages.num_rows, ROW_GROUP_ROWS):
        for batch in messages.slice(start, ROW_GROUP_ROWS).to_batches():
            target.add(batch)
        target.write_row_group()
    return target.close()
