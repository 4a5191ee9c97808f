"""One entry of a consume queue: 20 bytes that say where a message lies; see docs/formats/consume-queue.md."""

from __future__ import annotations

import struct
from typing import Final

# One entry: physical offset, record size, tags code. See docs/formats/consume-queue.md.
ENTRY: Final = struct.Struct(">qiq")
ENTRY_SIZE: Final = 20
assert ENTRY.size == ENTRY_SIZE

# Stands where a queue has no message: before the first entry of a queue that did not begin at 0.
BLANK: Final = ENTRY.pack(0, 0x7FFFFFFF, 0)


def count_valid(block: bytes) -> int:
    """How many entries of `block` stand before the first that is not valid (offset negative, or size not positive)."""
    sizes = block[8::20], block[9::20], block[10::20], block[11::20]
    if block[::20].isascii() and sizes[0].isascii():  # no sign bits: a look at every entry without a loop
        joined = 0
        for column in sizes:
            joined |= int.from_bytes(column, "big")
        zero = joined.to_bytes(len(sizes[0]), "big").find(b"\0")
        return len(block) // ENTRY_SIZE if zero < 0 else zero
    for number, (physical_offset, size, _) in enumerate(ENTRY.iter_unpack(block)):
        if physical_offset < 0 or size <= 0:
            return number
    return len(block) // ENTRY_SIZE
