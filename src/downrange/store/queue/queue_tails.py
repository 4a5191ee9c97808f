"""The newest entries of all queues, and the numbers that change with every message: dense, in two pieces of memory.

With tens of thousands of queues each message goes to another one, so what it touches is not in the processor's cache.
As objects with numbers a queue is a dozen places of memory; here it is one row, and one block of entries. The layout is
known to `_compiled/queue_tails.h`, too.

A row has eight 64-bit numbers:

| number | meaning |
|---|---|
| NEXT | the queue offset that the next message gets |
| END | where the queue ends, in logical bytes: 20 for each entry |
| PHYSICAL_END | where the record of the last entry ends in the commit log; 0 when there is none |
| AT | where the next entry goes in `memory`; a multiple of 256 when that takes a new block, 0 without any |
| MESSAGES, BYTES | what came in since `ConsumeQueues.take_counts` was asked; here it costs nothing |
| SPILL_AT | the END at which the entries have to be written to the file; 0 while none may be put |
| START | where the entries that are in memory begin, in logical bytes |

A block has 256 bytes: where the queue's block before begins (0: it is the first one), 8 bytes for nothing, 12 entries.
All blocks of a queue but the last are full. Block 0 holds no entries but three numbers: the first block of the free
ones (each names the next one), where the blocks end that were ever used, and how many are in use.
"""

from __future__ import annotations

import struct
from array import array
from typing import Final

ROW: Final = 8
NEXT, END, PHYSICAL_END, AT, MESSAGES, BYTES, SPILL_AT, START = range(ROW)
BLOCK: Final = 256
FIRST: Final = 16
"""Where the first entry of a block stands."""
_ENTRIES: Final = BLOCK - FIRST

PUT_STATE: Final = struct.Struct("=6q")
"""END to SPILL_AT of a row: what putting an entry has to know. It begins 8 bytes behind the row."""
PUT_DONE: Final = struct.Struct("=5q")
"""The first five of them: what putting an entry changes."""
_TAIL: Final = struct.Struct("=q8xq")  # END, AT
_LINK: Final = struct.Struct("=q")
_HEADER: Final = struct.Struct("=3q")

_MOST_ROOM: Final = 16_380  # written or not: enough for every consumer that keeps up
_ROOM_OF_ALL: Final = 128 << 20
_LEAST_ROOM: Final = 960  # four blocks
_LEAST_GROWTH: Final = 256 * BLOCK
_WORTH_SHRINKING: Final = 1 << 20


class QueueTails:
    """What all queues of one store have in memory. `rows` and `memory` stay the same objects for good.

    Holds always: a queue's entries from START to END lie in its blocks. Its `ConsumeQueue` alone works on a row, but
    for the dispatcher and the commit log, which do for a run of messages what it does for one. For the store's thread.
    """

    __slots__ = ("_free_rows", "memory", "rows")

    def __init__(self) -> None:
        self.rows = array("q")
        self.memory = bytearray(BLOCK)
        self._free_rows: list[int] = []
        _HEADER.pack_into(self.memory, 0, 0, BLOCK, 0)

    def __repr__(self) -> str:
        return f"<QueueTails queues={len(self.rows) // ROW - len(self._free_rows)} blocks={self.blocks}>"

    @property
    def blocks(self) -> int:
        """How many are in use."""
        return int(_HEADER.unpack_from(self.memory)[2])

    @property
    def queues(self) -> int:
        """For so many there is a row, used or not."""
        return len(self.rows) // ROW

    @property
    def room(self) -> int:
        """How many bytes of entries a queue may keep: of thousands each only a few, so that all together stay small."""
        of_each = _ROOM_OF_ALL // max(1, self.queues)
        return max(_LEAST_ROOM, min(of_each - of_each % _ENTRIES, _MOST_ROOM))

    def add_row(self) -> int:
        """A row of zeros: its place in `rows`."""
        if self._free_rows:
            return self._free_rows.pop()
        row = len(self.rows)
        self.rows.extend((0,) * ROW)
        return row

    def remove_row(self, row: int) -> None:
        self.free(row)
        self.rows[row : row + ROW] = array("q", (0,) * ROW)
        self._free_rows.append(row)

    def make_room(self, blocks: int) -> None:
        """Let so many blocks be taken without `memory` having to grow."""
        missing = _HEADER.unpack_from(self.memory)[1] + blocks * BLOCK - len(self.memory)
        if missing > 0:
            self.memory.extend(bytes(max(missing, len(self.memory) // 8 // BLOCK * BLOCK, _LEAST_GROWTH)))

    def take_block(self, at: int) -> int:
        """A block after the one that ends at `at` (0: the queue has none); where its first entry goes."""
        memory = self.memory
        block, used, count = _HEADER.unpack_from(memory)
        if block:
            (free,) = _LINK.unpack_from(memory, block)
        else:
            self.make_room(1)
            free, block = 0, used
            used += BLOCK
        _LINK.pack_into(memory, block, at - BLOCK if at else 0)
        _HEADER.pack_into(memory, 0, free, used, count + 1)
        return int(block) + FIRST

    def extend(self, row: int, entries: bytes) -> None:
        """Put packed entries behind the last one; END and AT move on."""
        rows, memory = self.rows, self.memory
        at, done = rows[row + AT], 0
        while done < len(entries):
            if at % BLOCK == 0:
                at = self.take_block(at)
            part = entries[done : done + BLOCK - at % BLOCK]
            memory[at : at + len(part)] = part
            at += len(part)
            done += len(part)
        rows[row + AT] = at
        rows[row + END] += done

    def read(self, row: int, position: int, stop: int) -> bytes:
        """The entries from one logical byte to another; both lie from START to END."""
        return read_tail(self.rows, self.memory, row, position, stop)

    def free(self, row: int) -> None:
        """Give the blocks of a queue back: its entries are written, or not wanted."""
        rows, memory = self.rows, self.memory
        rows[row + START] = rows[row + END]
        last = block = rows[row + AT] - 1 & -BLOCK
        if last < 0:
            return
        count = 1
        while (before := _LINK.unpack_from(memory, block)[0]) > 0:
            block = before
            count += 1
        free, used, in_use = _HEADER.unpack_from(memory)
        _LINK.pack_into(memory, block, free)
        _HEADER.pack_into(memory, 0, last, used, in_use - count)
        rows[row + AT] = 0

    def shrink(self) -> None:
        """Give memory back to the system when little of it is in use."""
        rows = self.rows
        free = set(self._free_rows)
        while len(rows) - ROW in free:
            free.remove(len(rows) - ROW)
            del rows[-ROW:]
        self._free_rows = sorted(free, reverse=True)
        if len(self.memory) < _WORTH_SHRINKING or self.blocks * BLOCK > len(self.memory) // 4:
            return
        kept = [
            (row, self.read(row, rows[row + START], rows[row + END]))
            for row in range(0, len(rows), ROW)
            if rows[row + AT]
        ]
        del self.memory[BLOCK:]
        _HEADER.pack_into(self.memory, 0, 0, BLOCK, 0)
        for row, entries in kept:
            rows[row + AT] = 0
            rows[row + END] = rows[row + START]
            self.extend(row, entries)


def read_tail(rows: array[int], memory: bytearray, row: int, position: int, stop: int) -> bytes:
    """The entries of a queue from one logical byte to another; both lie from START to END."""
    end, at = _TAIL.unpack_from(rows, row * 8 + 8)
    block = at - 1 & -BLOCK
    begin = end - (at - block - FIRST)
    if begin <= position:  # in one block
        first = block + FIRST - begin
        return bytes(memory[first + position : first + stop])
    pieces = []
    while begin > position:
        if begin < stop:
            pieces.append(memory[block + FIRST : block + FIRST + min(_ENTRIES, stop - begin)])
        (block,) = _LINK.unpack_from(memory, block)
        begin -= _ENTRIES
    first = block + FIRST - begin
    pieces.append(memory[first + position : first + min(begin + _ENTRIES, stop)])
    pieces.reverse()
    return b"".join(pieces)
