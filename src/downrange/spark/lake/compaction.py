"""Joins the small files of a day into a few large ones.

The archive writes a file for every queue and batch, so that it never rewrites a file. Readers prefer large files.
Rows keep their values; they are sorted by broker, queue and offset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import TEMPORARY, LakeError, partition_of
from downrange.spark.lake.manifest import LakeFile, QueueRange
from downrange.spark.lake.parquet_file import ParquetFile

NAME: Final = "compaction"
TARGET_BYTES: Final = 256 * 1024 * 1024
_BATCH_ROWS: Final = 64 * 1024


class Compacted(NamedTuple):
    """One large file and the number of files it replaced."""

    file: LakeFile
    replaced: int


def compact(
    lake: Lake,
    topics: Iterable[str] = (),
    *,
    target_bytes: int = TARGET_BYTES,
    on_file: Callable[[Compacted], None] | None = None,
) -> list[Compacted]:
    """Rewrite files of less than half of `target_bytes`, day by day. An archive may run at the same time."""
    if target_bytes < 1:
        raise LakeError(f"a file of {target_bytes} bytes cannot be the aim of a compaction")
    done = []
    with lake.writing(NAME):
        for group in plan(lake.files(list(topics)), target_bytes):
            compacted = Compacted(_merge(lake, group), len(group))
            lake.commit_compaction(group, compacted.file)
            done.append(compacted)
            if on_file is not None:
                on_file(compacted)
        lake.settle()
    return done


def plan(files: Iterable[LakeFile], target_bytes: int) -> list[list[LakeFile]]:
    """The groups of files to join: small files of the same topic and day, in the order of their messages."""
    by_partition: dict[tuple[str, str], list[LakeFile]] = {}
    for file in files:
        if file.bytes < target_bytes // 2:
            by_partition.setdefault((file.date, file.topic), []).append(file)
    groups = []
    for _, small in sorted(by_partition.items()):
        group: list[LakeFile] = []
        size = 0
        for file in sorted(small, key=lambda file: file.ranges):
            if group and size + file.bytes > target_bytes:
                groups.append(group)
                group, size = [], 0
            group.append(file)
            size += file.bytes
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _merge(lake: Lake, group: list[LakeFile]) -> LakeFile:
    paths = "\n".join(file.path for file in group)
    # The name depends on the replaced files: work that is repeated after a crash gives the same file.
    digest = hashlib.sha256(paths.encode()).hexdigest()[:24]
    topic, date = group[0].topic, group[0].date
    temporary = f"{TEMPORARY}/{NAME}/{digest}.part"
    target = ParquetFile(lake.root / temporary)
    schema = pa.unify_schemas([pq.read_schema(lake.path_of(file)) for file in group])
    for file in group:
        for batch in _rows(lake, file, schema):
            target.add(batch)
    target.close()
    expected = sum(file.rows for file in group)
    if target.rows != expected:
        raise LakeError(f"{topic} of {date}: {target.rows} rows read where the manifest has {expected}")
    return LakeFile(
        path=f"{partition_of(topic, date)}/compacted-{digest}.parquet",
        temporary=temporary,
        topic=topic,
        date=date,
        rows=target.rows,
        bytes=target.written_bytes,
        crc32=target.crc32,
        min_store_millis=min(file.min_store_millis for file in group),
        max_store_millis=max(file.max_store_millis for file in group),
        ranges=tuple(_joined(part for file in group for part in file.ranges)),
    )


def _rows(lake: Lake, file: LakeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(lake.path_of(file)) as source:
        for batch in source.iter_batches(_BATCH_ROWS):
            if batch.schema.equals(schema):
                yield batch
            else:  # some files have the column properties, others do not
                columns = [
                    batch.column(field.name) if field.name in batch.schema.names else pa.nulls(len(batch), field.type)
                    for field in schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined(ranges: Iterable[QueueRange]) -> Iterator[QueueRange]:
    """Join adjacent ranges; messages between two ranges are not in the file."""
    current: QueueRange | None = None
    for part in sorted(ranges):
        if current is not None and part[:2] == current[:2] and part.start == current.end:
            current = QueueRange(part.broker, part.queue_id, current.start, part.end)
            continue
        if current is not None:
            yield current
        current = part
    if current is not None:
        yield current
