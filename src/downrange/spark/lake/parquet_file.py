"""Writes one Parquet file of a lake: gathers rows into large row groups, and computes a checksum of the bytes."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

# Columns whose values repeat within a queue have dictionaries; ids and bodies do not repeat.
_DICTIONARIES: Final = ["broker", "tags", "born_host", "store_host", "sys_flag", "reconsume_times", "queue_id"]
_MAP_KEYS: Final = "properties.key_value.key"
_GROWING: Final = dict.fromkeys(("queue_offset", "physical_offset", "born_time", "store_time"), "DELTA_BINARY_PACKED")
# Columns with statistics; the smallest and largest body would not help a reader to skip a row group.
_STATISTICS: Final = [
    "broker",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "unique_key",
    "keys",
    "tags",
    "born_time",
    "store_time",
]
ROW_GROUP_ROWS: Final = 256 * 1024
ROW_GROUP_BYTES: Final = 64 * 1024 * 1024


class _SummedFile:
    """A file that computes the CRC-32 of the bytes written to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.crc32 = 0
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        count = self._file.write(data)
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._file.flush()

    def begin_to_sync(self) -> None:
        """Start writing to the disk without waiting for it; pages that were written leave the page cache."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):  # not on every system
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


class ParquetFile:
    """A file that is being written. `add` batches to it, then `close` it; only then it is safe on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.buffered_bytes = 0
        self._buffered_rows = 0
        self._buffered: list[pa.RecordBatch] = []
        self._file: _SummedFile | None = None
        self._writer: pq.ParquetWriter | None = None

    @property
    def written_bytes(self) -> int:
        return 0 if self._file is None else self._file.bytes

    @property
    def crc32(self) -> int:
        return 0 if self._file is None else self._file.crc32

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
        if self._writer is None:
            self._open(table.schema)
        assert self._writer is not None
        assert self._file is not None
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._file.begin_to_sync()
        self._buffered = []
        self._buffered_rows = self.buffered_bytes = 0

    def close(self) -> None:
        """Finish the file; it is on disk when this returns."""
        self.write_row_group()
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()

    def discard(self) -> None:
        """Delete the file."""
        self._buffered = []
        with contextlib.suppress(OSError):  # perhaps the file is discarded because the disk is full
            self.close()
        self.path.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> None:
        names = set(schema.names)
        dictionaries = [name for name in _DICTIONARIES if name in names]
        if "properties" in names:
            dictionaries.append(_MAP_KEYS)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _SummedFile(self.path)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, mode="w"),
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=dictionaries,
            column_encoding={name: kind for name, kind in _GROWING.items() if name in names},
            write_statistics=[name for name in _STATISTICS if name in names],
            store_schema=True,
        )
