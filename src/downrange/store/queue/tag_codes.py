"""Messages by tag: the hash codes a reader wants, compared with those in the queue entries."""

from __future__ import annotations

import struct
from array import array
from typing import Final

from downrange.compiled import steps
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

    def pick(self, backlog: Backlog, most: int) -> Picked | None:
        """The entries that pass, as many as a reply may have; None unless each points behind the one before."""
        if steps is not None:
            picked = steps.pick_by_tags(backlog[0], self._sorted, most, backlog[4])
            if picked is not None:
                return picked
        return self.pick_in_python(backlog, most)

    def pick_in_python(self, backlog: Backlog, most: int) -> Picked | None:
        raw, *_, most_bytes = backlog
        codes = self._codes
        picked: list[bytes] = []
        scanned = byte_count = before = 0
        for offset, size, code in _ENTRY.iter_unpack(raw):
            if offset < before:
                return None
            before = offset
            if picked and (len(picked) >= most or byte_count + size > most_bytes):
                break
            scanned += 1
            if code in codes:
                picked.append(raw[scanned * ENTRY_SIZE - ENTRY_SIZE : scanned * ENTRY_SIZE])
                byte_count += size
        return b"".join(picked), scanned
