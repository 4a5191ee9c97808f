"""Records of a queue that are read the simple way: all in one file of the log, each behind the one before.

That is how a backlog is drained. What is not so simple is left to `MessageReader.read`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from downrange.store.queue.queue_entry import ENTRY_SIZE

# Records that lie apart are copied together up to this many bytes: cheaper than many entries of a gathering write.
_COPY_BELOW: Final = 64 * 1024

# Queue entries, the file of the log that the first of them points into, as a view, its start and how much of it may be
# read, and how many bytes of records are the most.
Backlog = tuple[bytes, memoryview, int, int, int]
# The entries that were wanted, and how many were looked at for them.
Picked = tuple[bytes, int]
# Pieces that make up the records one behind the other, how many records, how many bytes.
Records = tuple[Sequence[memoryview], int, int]


@lru_cache(maxsize=256)
def _entries(count: int) -> struct.Struct:
    """So many queue entries, read at once: a call for each would take three times as long."""
    return struct.Struct(">" + "qiq" * count)


def records_of(backlog: Backlog) -> Records | None:
    """All records of its entries. None when it is not so simple; `read` knows."""
    raw, view, start, readable, most_bytes = backlog
    count = len(raw) // ENTRY_SIZE
    numbers = _entries(count).unpack_from(raw)
    offsets, sizes = numbers[::3], numbers[1::3]
    first, last = offsets[0], offsets[-1]
    byte_count = sum(sizes)
    end = last + sizes[-1]
    if byte_count > most_bytes or min(offsets) < first or max(offsets) > last or end > start + readable:
        return None
    if end - first == byte_count:  # next to each other
        return [view[first - start : end - start]], count, byte_count
    if byte_count > _COPY_BELOW:
        return None
    pieces = [view[at - start : at - start + size] for at, size in zip(offsets, sizes, strict=True)]
    return pieces, count, byte_count
