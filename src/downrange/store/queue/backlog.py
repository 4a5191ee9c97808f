"""Many records of a queue at once: their queue entries, and the one file of the log that all of them lie in."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from downrange.compiled import accelerated
from downrange.store.queue.queue_entry import ENTRY, ENTRY_SIZE

# Records that lie apart are copied together up to this many bytes, or if they are smaller than this on average: that is
# cheaper than many entries of a gathering write.
_COPY_BELOW: Final = 64 * 1024
_COPY_PIECES_BELOW: Final = 8 * 1024
_MOST_AT_ONCE: Final = 256

# Queue entries, a view of the log file that they point into, the log offset where that file starts, and how many of its
# bytes may be read.
Backlog = tuple[bytes, memoryview, int, int]
# The entries that are wanted, how many entries were looked at to find them, and how many bytes their records have.
Picked = tuple[bytes, int, int]
# Records that were found: a backlog of wanted entries only, or views of the log where they lie in several files.
Records = Backlog | list[memoryview]


@lru_cache(maxsize=_MOST_AT_ONCE)
def _entries(count: int) -> struct.Struct:
    """So many queue entries, read at once: a call for each would take three times as long."""
    return struct.Struct(">" + "qiq" * count)


@lru_cache(maxsize=4)
def _offsets_and_sizes(entries: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of queue entries. Remembered: `pieces_of` asks for those that `pick_all` has just read."""
    numbers = _entries(len(entries) // ENTRY_SIZE).unpack(entries)
    return numbers[::3], numbers[1::3]


@accelerated
def pick_all(backlog: Backlog, most: int, most_bytes: int) -> Picked | None:
    """The first entries, as many as one reply may have; None when their records have to be looked at one by one."""
    raw, _, start, readable = backlog
    entries = raw[: most * ENTRY_SIZE]
    count = len(entries) // ENTRY_SIZE
    if count > _MOST_AT_ONCE:
        return None
    offsets, sizes = _offsets_and_sizes(entries)
    first, last = offsets[0], offsets[-1]
    byte_count = sum(sizes)
    if byte_count > most_bytes or min(offsets) < first or max(offsets) > last or last + sizes[-1] > start + readable:
        return None
    return entries, count, byte_count


def pieces_of(records: Records, byte_count: int) -> list[memoryview]:
    """The records, one behind the other: views of the log, large ones in one view if they lie next to each other."""
    if isinstance(records, list):
        return records
    entries, view, start, _ = records
    first = int.from_bytes(entries[:8], "big")
    last, last_size, _ = ENTRY.unpack_from(entries, len(entries) - ENTRY_SIZE)
    if last + last_size - first == byte_count:
        return [view[first - start : first - start + byte_count]]
    if byte_count <= _COPY_BELOW and len(entries) <= _MOST_AT_ONCE * ENTRY_SIZE:
        offsets, sizes = _offsets_and_sizes(entries)
        return [view[(at := offset - start) : at + size] for offset, size in zip(offsets, sizes, strict=True)]
    pieces = []
    begin = end = first
    for offset, size, _ in ENTRY.iter_unpack(entries):
        if offset != end:
            pieces.append(view[begin - start : end - start])
            begin = offset
        end = offset + size
    pieces.append(view[begin - start : end - start])
    return pieces


def are_better_copied(pieces: list[memoryview], byte_count: int) -> bool:
    """Whether a copy of these pieces in one buffer is cheaper to send than each of them."""
    return len(pieces) > 1 and (byte_count <= _COPY_BELOW or byte_count < len(pieces) * _COPY_PIECES_BELOW)
