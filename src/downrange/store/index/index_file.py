"""One file of the key index: a header, slots, entries; see docs/formats/key-index.md."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

# begin and end store timestamp, begin and end physical offset, used slots, number of the next entry (the first is 1).
HEADER: Final = struct.Struct(">qqqqii")
SLOT: Final = struct.Struct(">i")
# key hash, physical offset, seconds since the file's begin timestamp, number of the entry before in the chain.
ENTRY: Final = struct.Struct(">iqii")
assert (HEADER.size, SLOT.size, ENTRY.size) == (40, 4, 20)

MAX_INT: Final = 0x7FFFFFFF
_pack_header = HEADER.pack_into


class IndexFile:
    """One file of the index: its header as numbers, and its memory map while it is needed.

    The header on disk is written after every message or run of messages. Independent of the other files.
    """

    __slots__ = (
        "begin_offset",
        "begin_timestamp",
        "end_offset",
        "end_timestamp",
        "limit",
        "map",
        "next_entry",
        "path",
        "used_slots",
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin_timestamp = self.end_timestamp = 0
        self.begin_offset = self.end_offset = 0
        self.used_slots = 0
        self.next_entry = 1
        self.map: mmap.mmap | None = None
        self.limit = 0
        """Number of the first entry without reserved disk blocks; 0 while the file is not written."""

    def read_header(self) -> None:
        with self.path.open("rb") as stream:
            values = HEADER.unpack(stream.read(HEADER.size))
        self.begin_timestamp, self.end_timestamp, self.begin_offset, self.end_offset = values[:4]
        self.used_slots, next_entry = values[4:]
        self.next_entry = max(1, next_entry)

    def write_header(self, to: mmap.mmap) -> None:
        _pack_header(
            to,
            0,
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_offset,
            self.end_offset,
            self.used_slots,
            self.next_entry,
        )

    def seconds_at(self, store_timestamp: int) -> int:
        """The time in the form of an entry: seconds since the begin timestamp, limited to 31 bits."""
        seconds = (store_timestamp - self.begin_timestamp) // 1000
        if not 0 <= seconds <= MAX_INT or self.begin_timestamp <= 0:
            return MAX_INT if seconds > 0 < self.begin_timestamp else 0
        return seconds

    def unmap(self) -> None:
        if self.map is not None:
            self.map.close()
            self.map = None
