"""Sorts the messages of a day by key, and joins small files into a few large ones.

Every task of an archive writes files of its own, in the order of queues and offsets, so that it never rewrites a file.
Readers prefer large files, and a reader who looks for a key skips the files and row groups whose smallest and largest
keys exclude it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
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
_SORTED: Final = "compacted-"
"""How the names of sorted files begin."""


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
    """Sort files that are not sorted and join small ones, day by day. An archive may run at the same time."""
    if target_bytes < 1:
        raise LakeError(f"a file of {target_bytes} bytes cannot be the aim of a compaction")
    done = []
    for chosen in plan(lake.files(list(topics)), target_bytes):
        for old in _runs(chosen, RUN_FILES * target_bytes):
            compacted = Compacted(_sorted_files(lake, old, target_bytes), len(old))
            lake.commit_compaction(old, compacted.files)
            done.append(compacted)
            if on_run is not None:
                on_run(compacted)
    return done


def plan(files: Iterable[LakeFile], target_bytes: int) -> list[list[LakeFile]]:
    """The files to rewrite, of each topic and day, in the order of their store times.

    These are the files that are not sorted, and the small ones: files of less than half of `target_bytes`. A small file
    that is sorted stays as it is if there is no other file to join it with.
    """
    by_partition: dict[tuple[str, str], list[LakeFile]] = {}
    for file in files:
        if not _is_sorted(file) or file.bytes < target_bytes // 2:
            by_partition.setdefault((file.date, file.topic), []).append(file)
    return [
        sorted(chosen, key=lambda file: (file.low["store_time"], file.path))
        for _, chosen in sorted(by_partition.items())
        if _gain(chosen)
    ]


def _gain(files: list[LakeFile]) -> bool:
    """Whether it is of use to rewrite these files together."""
    return len(files) > 1 or not _is_sorted(files[0])


def _is_sorted(file: LakeFile) -> bool:
    return PurePosixPath(file.path).name.startswith(_SORTED)


def _runs(chosen: list[LakeFile], run_bytes: int) -> Iterator[list[LakeFile]]:
    """Files that are sorted together: one commit replaces them."""
    run: list[LakeFile] = []
    for file in chosen:
        run.append(file)
        if sum(one.bytes for one in run) >= run_bytes or file is chosen[-1]:
            if _gain(run):
                yield run
            run = []


def _sorted_files(lake: Lake, old: list[LakeFile], target_bytes: int) -> list[LakeFile]:
    topic, date = old[0].topic, old[0].date
    expected = sum(file.rows for file in old)
    rows = max(1, round(expected * min(1.0, target_bytes / sum(file.bytes for file in old))))
    new = [
        _written(lake, topic, date, part) for messages in _portions(lake, old) for part in _even_parts(messages, rows)
    ]
    if (found := sum(file.rows for file in new)) != expected:
        raise LakeError(f"{topic} of {date}: {found} rows read where the log has {expected}")
    return new


def _portions(lake: Lake, files: Iterable[LakeFile]) -> Iterator[pa.Table]:
    """All messages of the files, sorted; several tables if they take more than RUN_MEMORY."""
    filesystem = lake.location.filesystem()
    tables: list[pa.Table] = []
    for file in files:
        with (
            storage_errors(lake.location),
            pq.ParquetFile(file.path, filesystem=filesystem, page_checksum_verification=True) as source,
        ):
            for number in range(source.num_row_groups):
                tables.append(source.read_row_group(number))
                if sum(table.nbytes for table in tables) >= RUN_MEMORY:
                    yield _in_order(tables)
                    tables = []
    if tables:
        yield _in_order(tables)


def _in_order(tables: list[pa.Table]) -> pa.Table:
    messages = pa.concat_tables(tables, promote_options="default")  # some files have no properties
    return messages.sort_by([order for order in _ORDER if order[0] in messages.column_names])


def _even_parts(messages: pa.Table, rows: int) -> Iterator[pa.Table]:
    """Parts of about so many rows: none is much smaller than the others."""
    count = max(1, round(messages.num_rows / rows))
    size = -(-messages.num_rows // count)
    for start in range(0, messages.num_rows, size):
        yield messages.slice(start, size)


def _written(lake: Lake, topic: str, date: str, messages: pa.Table) -> LakeFile:
    target = ParquetFile(lake.location, topic, date, f"{_SORTED}{uuid.uuid4().hex}.parquet")
    for start in range(0, messages.num_rows, ROW_GROUP_ROWS):
        for batch in messages.slice(start, ROW_GROUP_ROWS).to_batches():
            target.add(batch)
        target.write_row_group()
    return target.close()
