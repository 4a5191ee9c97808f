"""Checks that a lake has all files of its Delta table undamaged, and no message twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeFile

_PLACE = ["broker", "queue_id", "queue_offset"]


def problems(lake: Lake) -> Iterator[str]:
    """One line for each problem: missing and damaged files, and messages that are there twice."""
    files = sorted(lake.files(), key=lambda file: (file.topic, file.date))
    for (topic, date), of_day in groupby(files, key=lambda file: (file.topic, file.date)):
        places = []
        for file in of_day:
            found = _places(lake, file)
            if isinstance(found, str):
                yield f"{file.path}: {found}"
            else:
                places.append(found)
        yield from _doubled(topic, date, places)


def _places(lake: Lake, file: LakeFile) -> pa.Table | str:
    """The places of the messages of a file, or what is wrong with it. Every page is read, as its checksum covers it."""
    filesystem = lake.location.filesystem()
    try:
        info = filesystem.get_file_info(file.path)
        if not info.is_file:
            return "missing"
        if info.size != file.bytes:
            return f"{info.size} bytes, expected {file.bytes}"
        rows = 0
        batches = []
        with filesystem.open_input_file(file.path) as source:
            parquet = pq.ParquetFile(source, page_checksum_verification=True)
            for batch in parquet.iter_batches():
                rows += batch.num_rows
                batches.append(batch.select(_PLACE))
    except (OSError, pa.ArrowException) as error:
        return f"damaged: {str(error).splitlines()[0]}"
    return pa.Table.from_batches(batches) if rows == file.rows else f"{rows} rows, expected {file.rows}"


def _doubled(topic: str, date: str, places: Iterable[pa.Table]) -> Iterator[str]:
    tables = list(places)
    if not tables:
        return
    counted = pa.concat_tables(tables).group_by(_PLACE).aggregate([([], "count_all")])
    for row in counted.filter(pa.compute.greater(counted["count_all"], 1)).to_pylist():
        place = f"queue {row['queue_id']} of {topic} on {row['broker']}"
        yield f"{place}: offset {row['queue_offset']} is there {row['count_all']} times on {date}"
