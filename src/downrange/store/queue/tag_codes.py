"""Messages by tag: the hash codes a reader wants, compared with those in the queue entries."""

from __future__ import annotations

import struct
from array import array
from functools import lru_cache
from typing import Final

from downrange.compiled import accelerated
from downrange.store.queue.backlog import Backlog, Picked
from downrange.store.queue.consume_queue_ext import ExtUnit
from downrange.store.queue.queue_entry import ENTRY, ENTRY_SIZE

# Of the code the low 32 bits, as Java reads them: a delay queue keeps delivery times in the place of the hash.
_ENTRY: Final = struct.Struct(">qi4xi")
assert _ENTRY.size == ENTRY.size


class TagCodes:
    """A test of queue entries that those with one of these codes pass. A value; a text with the same hash passes, too.

    Of an entry whose message has its code elsewhere (`ConsumeQueueExt`), only a call can tell.
    """

    __slots__ = ("_codes", "_sorted")

    def __init__(self, codes: frozenset[int]) -> None:
        self._codes = codes
        self._sorted = array("i", sorted(code for code in codes if -(1 << 31) <= code < 1 << 31)).tobytes()

    def __call__(self, tags_code: int | None, unit: ExtUnit | None) -> bool:
        if tags_code is None:
            return True
        low = tags_code & 0xFFFFFFFF
        return (low - 0x1_0000_0000 if low & 0x8000_0000 else low) in self._codes

    def pick(self, backlog: Backlog, most: int, most_bytes: int) -> Picked | None:
        """The entries that pass, as many as one reply may have; None when they have to be looked at one by one."""
        return pick_by_tags(backlog, most, most_bytes, self._sorted)


@lru_cache(maxsize=4096)
def _set_of(codes: bytes) -> frozenset[int]:
    return frozenset(array("i", codes))


@accelerated
def pick_by_tags(backlog: Backlog, most: int, most_bytes: int, codes: bytes) -> Picked | None:
    """`TagCodes.pick` for codes that are sorted 32-bit numbers."""
    raw, _, start, readable = backlog
    wanted = _set_of(codes)
    picked: list[bytes] = []
    scanned = byte_count = 0
    before, end = start, start + readable
    for offset, size, code in _ENTRY.iter_unpack(raw):
        if offset < before:
            return None
        before = offset
        if picked and (len(picked) >= most or byte_count + size > most_bytes):
            break
        scanned += 1
        if code in wanted:
            if size <= 0 or offset + size > end:
                return None
            picked.append(raw[scanned * ENTRY_SIZE - ENTRY_SIZE : scanned * ENTRY_SIZE])
            byte_count += size
    return b"".join(picked), scanned, byte_count
