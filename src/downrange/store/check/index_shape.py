"""How many slots and entries the files of an index have, read off the files themselves.

A file has a header of 40 bytes, then slots of 4 bytes, then entries of 20 bytes, so its length alone allows many
shapes: one with five slots more and one entry less is as long. Behind the last entry all bytes are zero. So the last
byte that is not zero says, with the number of entries in the header, where the entries begin, to within the 20 bytes of
one entry; and of the five shapes that remain, the length fits one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.store.index.index_file import ENTRY, HEADER, SLOT, IndexFile

_CHUNK_BYTES: Final = 1 << 20
# A broker that runs, or that crashed, may have written entries that its header does not count yet.
_MOST_UNCOUNTED: Final = 100_000


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How many slots and entries an index file has."""

    slots: int
    entries: int

    @property
    def file_size(self) -> int:
        return HEADER.size + SLOT.size * self.slots + ENTRY.size * self.entries


def shape_of(paths: Iterable[Path]) -> IndexShape | None:
    """The shape of files of one length: the first of them that shows it counts; None when none does."""
    return next((shape for path in paths if (shape := _read(path)) is not None), None)


def _read(path: Path) -> IndexShape | None:
    size = path.stat().st_size
    if size <= HEADER.size + ENTRY.size or (size - HEADER.size) % SLOT.size:
        return None
    file = IndexFile(path)
    file.read_header()
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        shapes = list(_candidates(size, file.next_entry, _end_of_data(mapped)))
        for shape in shapes:
            if _begins_as_its_header_says(mapped, shape, file):
                return shape
        if shapes and _used_slots(mapped, shapes[0]) == file.used_slots:
            return shapes[0]
    return None


def _end_of_data(mapped: mmap.mmap) -> int:
    """Position behind the last byte that is not zero."""
    end = len(mapped)
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        rest = mapped[start:end].rstrip(b"\0")
        if rest:
            return start + len(rest)
        end = start
    return 0


def _candidates(size: int, next_entry: int, end_of_data: int) -> Iterator[IndexShape]:
    """Shapes of this length whose last entry ends where the data ends; first that with the entries of the header."""
    fitting = (size - HEADER.size) // SLOT.size % 5  # of slots + 5 * entries
    for uncounted in range(_MOST_UNCOUNTED):
        least = end_of_data - HEADER.size - ENTRY.size * (next_entry + uncounted)  # bytes of slots, at least
        slots = max(0, -(-least // SLOT.size))
        slots += (fitting - slots) % 5
        entries = (size - HEADER.size - SLOT.size * slots) // ENTRY.size
        if slots > 0 and entries >= next_entry:
            yield IndexShape(slots, entries)
        if least <= 0:
            return


def _begins_as_its_header_says(mapped: mmap.mmap, shape: IndexShape, file: IndexFile) -> bool:
    at = HEADER.size + SLOT.size * shape.slots
    key_hash, offset, _, before = ENTRY.unpack_from(mapped, at + ENTRY.size)
    if any(mapped[at : at + ENTRY.size]) or offset != file.begin_offset or before or key_hash < 0:
        return False
    (newest,) = SLOT.unpack_from(mapped, HEADER.size + SLOT.size * (key_hash % shape.slots))
    return bool(newest >= 1)


def _used_slots(mapped: mmap.mmap, shape: IndexShape) -> int:
    return sum(1 for (entry,) in SLOT.iter_unpack(mapped[HEADER.size : HEADER.size + SLOT.size * shape.slots]) if entry)
