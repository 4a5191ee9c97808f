"""The timer wheel: a slot for each tick of two weeks (of seconds), which says where the chain of its units begins.

Layout: docs/formats/timer.md. A slot counts only if it holds the tick that is asked for: otherwise it was used for an
earlier turn of the wheel, and is empty.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from array import array
from pathlib import Path
from typing import Final, NamedTuple

from downrange.store.files import Files, opened

SLOTS: Final = 2 * 7 * 86_400
# Tick (time / precision), first and last position in the timer log, messages minus deletions, magic (0).
SLOT: Final = struct.Struct(">qqqii")
assert SLOT.size == 32


class TimerSlot(NamedTuple):
    """A slot that is in use."""

    tick: int
    first: int
    last: int
    waiting: int
    """Messages minus deletions."""


class TimerWheel:
    """The slots, in a mapped file that is made when the first message is put on the wheel.

    Holds always: of all ticks in use no two share a slot. The callers that put messages on the wheel see to it.
    """

    def __init__(self, path: Path, files: Files, slots: int = SLOTS) -> None:
        self._path = path
        self.slots = slots
        self._size = slots * SLOT.size
        self._files = files
        self._memory: mmap.mmap | None = None
        self.last_tick = -1
        """The latest tick that is in use, or was."""
        self.last_position = -1
        """The last position in the timer log that a slot held when the wheel was loaded."""

    def __repr__(self) -> str:
        return f"<TimerWheel {self._path} last_tick={self.last_tick}>"

    def load(self, *, writable: bool = True) -> bool:
        """Open the file if it is there and as large as it should be."""
        self._memory = None
        try:
            with opened(self._files, self._path, writable=writable) as descriptor:
                if os.fstat(descriptor).st_size != self._size:
                    return False
                if writable:
                    self._files.reserve(descriptor, 0, self._size)
                self._memory = self._files.map(descriptor, self._size, writable=writable)
        except FileNotFoundError:
            return False
        longs = array("q", self._memory[:])
        if sys.byteorder == "little":
            longs.byteswap()
        self.last_tick, self.last_position = max(longs[0::4]), max(longs[2::4])
        return True

    def get(self, tick: int) -> TimerSlot | None:
        """The slot of a tick; None when nothing is due in it."""
        if self._memory is None:
            return None
        found, first, last, count, _ = SLOT.unpack_from(self._memory, tick % self.slots * SLOT.size)
        return TimerSlot(found, first, last, count) if found == tick else None

    def put(self, tick: int, position: int, count: int) -> None:
        """Let the chain of a tick end at this position; `count` is added to its messages."""
        memory = self.memory
        slot = self.get(tick)
        if slot is None:
            SLOT.pack_into(memory, tick % self.slots * SLOT.size, tick, position, position, count, 0)
        else:
            SLOT.pack_into(memory, tick % self.slots * SLOT.size, tick, slot.first, position, slot.waiting + count, 0)
        if tick > self.last_tick:
            self.last_tick = tick

    @property
    def memory(self) -> mmap.mmap:
        """The slots as they lie in the file, which is made if it is missing."""
        return self._memory or self._make()

    def clear(self) -> None:
        """Empty all slots."""
        if self._memory is not None:
            self._memory[:] = bytes(self._size)
        self.last_tick = -1

    def count_between(self, tick: int, stop: int) -> int:
        """How many messages are due from `tick` up to `stop`."""
        slots = (self.get(one) for one in range(tick, min(stop, self.last_tick + 1)))
        return sum(max(0, slot.waiting) for slot in slots if slot is not None)

    def sync(self) -> None:
        """Make the slots safe. May run in a worker thread."""
        if self._memory is not None:
            with opened(self._files, self._path) as descriptor:
                self._files.sync(descriptor)

    def check(self, log_start: int, log_end: int, tick: int) -> list[str]:
        """What is wrong with slots from `tick` on: an empty list when nothing is."""
        problems: list[str] = []
        if self._memory is None:
            return problems
        for number, (found, first, last, _, _) in enumerate(SLOT.iter_unpack(self._memory[:])):
            if not found or found < tick:
                continue
            if found % self.slots != number:
                problems.append(f"timer wheel: slot {number} holds tick {found} of another slot")
            if not first <= last < log_end or last < log_start:
                problems.append(
                    f"timer wheel: slot {number} points to {first}..{last}, the timer log has {log_start}..{log_end}"
                )
        return problems

    def _make(self) -> mmap.mmap:
        self._files.create(self._path, self._size)
        with opened(self._files, self._path) as descriptor:
            self._files.reserve(descriptor, 0, self._size)
            self._memory = self._files.map(descriptor, self._size)
        self._files.sync_directory(self._path.parent)
        return self._memory
