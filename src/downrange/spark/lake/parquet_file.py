"""Writes one Parquet file of a lake: gathers rows into large row groups, and collects the statistics of the file."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from downrange.spark.lake.layout import LakeError, LakeFile, partition_of
from downrange.spark.lake.location import Location, Output, storage_errors

# Columns whose values repeat within a queue have dictionaries; ids and bodies do not repeat.
_DICTIONARIES: Final = ["broker", "tags", "born_host", "store_host", "sys_flag", "reconsume_times", "queue_id"]
_MAP_KEYS: Final = "properties.key_value.key"
_TIMES: Final = ("born_time", "store_time")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_GROWING: Final = dict.fromkeys(("queue_offset", "physical_offset", *_TIMES), "DELTA_BINARY_PACKED")
STATISTICS: Final = (
    "broker",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "unique_key",
    "keys",
    "tags",
    "born_time",
    "store_time",
)
"""Columns with statistics; the smallest and largest body would not help a reader to skip a file or row group."""
ROW_GROUP_ROWS: Final = 256 * 1024
ROW_GROUP_BYTES: Final = 64 * 1024 * 1024
_LONG_TEXT: Final = 128
"""Longer texts are cut in the statistics of the log."""


class ParquetFile:
    """A file that is being written. `add` batches to it, then `close` it; only then it is safe on disk."""

    def __init__(self, location: Location, topic: str, date: str, name: str) -> None:
        self.path = f"{partition_of(topic, date)}/{name}"
        self.rows = 0
        self.buffered_bytes = 0
        self._location = location
        self._topic, self._date = topic, date
        self._buffered_rows = 0
        self._buffered: list[pa.RecordBatch] = []
        self._output: Output | None = None
        self._writer: pq.ParquetWriter | None = None
        self._metadata: list[pq.FileMetaData] = []

    @property
    def written_bytes(self) -> int:
        return 0 if self._output is None else self._output.tell()

    def add(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self._buffered.append(batch)
        self._buffered_rows += batch.num_rows
        self.buffered_bytes += batch.nbytes
        if self._buffered_rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.write_row_group()

    def write_row_group(self) -> None:
        """Write the gathered rows to the file."""
        if not self._buffered:
            return
        table = pa.Table.from_batches(self._buffered)
        with storage_errors(self._location):
            if self._writer is None:
                self._open(table.schema)
            assert self._writer is not None
            assert self._output is not None
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self._output.flush()
        self._buffered = []
        self._buffered_rows = self.buffered_bytes = 0

    def close(self) -> LakeFile:
        """Finish the file; it is safe when this returns."""
        self.write_row_group()
        if self._writer is None or self._output is None:
            raise LakeError(f"{self.path} would have no messages")
        with storage_errors(self._location):
            self._writer.close()
            self._output.close()
        low, high, nulls = _statistics(self._metadata[0])
        return LakeFile(self.path, self._topic, self._date, self.rows, self.written_bytes, low, high, nulls)

    def discard(self) -> None:
        """Delete the file."""
        self._buffered = []
        with contextlib.suppress(LakeError):  # perhaps the file is discarded because the disk is full
            if self._writer is not None:
                self.close()
                self._location.remove(self.path)

    def _open(self, schema: pa.Schema) -> None:
        names = set(schema.names)
        dictionaries = [name for name in _DICTIONARIES if name in names]
        if "properties" in names:
            dictionaries.append(_MAP_KEYS)
        self._output = self._location.open_output(self.path)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._output, mode="w"),
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=dictionaries,
            column_encoding={name: kind for name, kind in _GROWING.items() if name in names},
            write_statistics=[name for name in STATISTICS if name in names],
            write_page_index=True,
            write_page_checksum=True,  # `downrange pipeline check` finds damaged files by it
            store_schema=True,
            metadata_collector=self._metadata,
        )


def _value(column: str, raw: Any) -> Any:
    """A value as Parquet stores it, in Python's type. Arrow would do this, too, and import pandas for it."""
    if column in _TIMES:
        return _EPOCH + timedelta(microseconds=raw)
    return raw.decode() if isinstance(raw, bytes) else raw


def _statistics(metadata: pq.FileMetaData) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Smallest and largest values and numbers of nulls of the columns that have statistics."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            column = metadata.row_group(group).column(index)
            name, found = column.path_in_schema, column.statistics
            if name not in STATISTICS or found is None:
                continue
            nulls[name] = nulls.get(name, 0) + (found.null_count or 0)
            if found.has_min_max:
                least, most = _value(name, found.min_raw), _value(name, found.max_raw)
                low[name] = min(low.get(name, least), least)
                high[name] = max(high.get(name, most), most)
    for name, value in high.items():
        if isinstance(value, str):
            low[name] = low[name][:_LONG_TEXT]
            high[name] = value if len(value) <= _LONG_TEXT else value[:_LONG_TEXT] + chr(0x10FFFF)
    return low, high, nulls
