"""Checks that a lake has all files of its manifest, and no others."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.manifest import LakeFile


def problems(lake: Lake) -> Iterator[str]:
    """One line for each problem: missing, damaged and stray files, and messages that are in two files."""
    contents = lake.contents()
    for file in contents.files.values():
        yield from _problems_of(lake, file)
    known = {lake.root / path for path in contents.files}
    for path in lake.root.glob("topic=*/**/*.parquet"):
        if path not in known:
            yield f"{path.relative_to(lake.root)}: not in the manifest"
    yield from _overlaps(list(contents.files.values()))


def _problems_of(lake: Lake, file: LakeFile) -> Iterator[str]:
    path = lake.root / file.path
    if not path.exists():
        is_waiting = (lake.root / file.temporary).exists()
        yield f"{file.path}: {'not in its place yet' if is_waiting else 'missing'}"
        return
    content = path.read_bytes()
    if len(content) != file.bytes or zlib.crc32(content) != file.crc32:
        yield f"{file.path}: not what was written: {len(content)} bytes, expected {file.bytes}, or another checksum"
        return
    rows = pq.ParquetFile(pa.BufferReader(content)).metadata.num_rows
    if rows != file.rows:
        yield f"{file.path}: {rows} rows, expected {file.rows}"


def _overlaps(files: list[LakeFile]) -> Iterator[str]:
    """Offsets in two files, unless one batch wrote both because the broker's clock went back over midnight."""
    ranges = [(file.topic, part, file) for file in files for part in file.ranges]
    ranges.sort(key=lambda claim: claim[:2])
    for (topic, part, file), (next_topic, next_part, next_file) in pairwise(ranges):
        same_queue = (topic, *part[:2]) == (next_topic, *next_part[:2])
        if same_queue and next_part.start < part.end and file.date == next_file.date:
            yield f"{next_file.path}: offset {next_part.start} is in {file.path} too"
