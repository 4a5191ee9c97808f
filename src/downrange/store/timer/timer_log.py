"""The timer log: one unit for each message that was put on the wheel, chained to the unit before it in its slot.

Layout: docs/formats/timer.md. Files are named by the position of their first byte and have their full size from the
start. A unit never spans two files: a file ends with a blank unit.
"""

from __future__ import annotations

import logging
import mmap
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from downrange.compiled import accelerated
from downrange.store.files import Files, opened

log = logging.getLogger(__name__)

# Size, previous position, magic, write time, slot time - write time, physical offset, record size, topic hash, 0.
UNIT: Final = struct.Struct(">iqiqiqiiq")
assert UNIT.size == 52
# Size of the rest of the file, 0, magic.
_BLANK: Final = struct.Struct(">iqI")
_BLANK_MAGIC: Final = 0xCBD43194
MAGIC_DEFAULT: Final = 1
MAGIC_ROLL: Final = 2
MAGIC_DELETE: Final = 4
_MOST_MAGIC: Final = 0xF
NO_POSITION: Final = -1
_NAME_DIGITS: Final = 20
_RESERVE_STEP: Final = 1 << 20
_SCAN_UNITS: Final = 4096


class TimerUnit(NamedTuple):
    """One unit: a record of the timer topic, and the tick in which it is due."""

    previous: int
    magic: int
    write_time: int
    delay: int
    physical_offset: int
    size: int
    topic_hash: int

    @property
    def slot_time(self) -> int:
        return self.write_time + self.delay

    @property
    def is_roll(self) -> bool:
        return bool(self.magic & MAGIC_ROLL)

    @property
    def is_delete(self) -> bool:
        """Whether this unit deletes messages of its slot. One that also rolls is on its way to the right slot."""
        return self.magic & (MAGIC_DELETE | MAGIC_ROLL) == MAGIC_DELETE


# Where a chain goes on; physical offsets and write times of messages and of those to roll; offsets of deletions.
Chained = tuple[int, bytes, bytes, bytes]


@accelerated
def follow_chain(memory: mmap.mmap, start: int, position: int, units: int) -> Chained:
    """Units of a chain from `position` back, at most so many, as long as they are in the file that begins at `start`.

    The numbers are as `array("q")` has them.
    """
    messages, rolls, deletes = array("q"), array("q"), array("q")
    for _ in range(units):
        if not start <= position < start + len(memory):
            break
        at = position - start
        values = UNIT.unpack_from(memory, at) if at + UNIT.size <= len(memory) else (0,)
        if values[0] != UNIT.size or not 0 < values[2] <= _MOST_MAGIC:
            position = NO_POSITION
            break
        previous, magic, write_time, physical_offset = values[1], values[2], values[3], values[5]
        if magic & (MAGIC_DELETE | MAGIC_ROLL) == MAGIC_DELETE:
            deletes.append(physical_offset)
        else:
            (rolls if magic & MAGIC_ROLL else messages).extend((physical_offset, write_time))
        position = previous if 0 <= previous < position else NO_POSITION
    return position, messages.tobytes(), rolls.tobytes(), deletes.tobytes()


class _LogFile:
    """One mapped file of the timer log."""

    __slots__ = ("_files", "_reserved", "memory", "path", "start")

    def __init__(self, path: Path, size: int, files: Files, *, writable: bool) -> None:
        self.path = path
        self.start = int(path.name)
        self._files = files
        self._reserved = 0
        with opened(files, path, writable=writable) as descriptor:
            self.memory: mmap.mmap = files.map(descriptor, size, writable=writable)

    def make_room(self, end: int) -> None:
        """Reserve disk blocks up to this byte: writing to a mapped page without one would kill the process."""
        if end > self._reserved:
            reserved = min(len(self.memory), (end // _RESERVE_STEP + 1) * _RESERVE_STEP)
            with opened(self._files, self.path) as descriptor:
                self._files.reserve(descriptor, self._reserved, reserved - self._reserved)
            self._reserved = reserved

    @property
    def limit(self) -> int:
        """The position before which units must end: blocks are reserved, and the blank unit has its place."""
        return self.start + min(self._reserved, len(self.memory) - _BLANK.size)


class TimerLog:
    """Units in the order in which messages were put on the wheel.

    Holds always: behind `end` there are zeros; a unit's `previous` is smaller than its own position. One thread appends
    and reads; `sync` may run beside it.
    """

    def __init__(self, directory: Path, file_size: int, files: Files, *, writable: bool = True) -> None:
        self._directory = directory
        self._writable = writable
        self._file_size = max(file_size, UNIT.size + _BLANK.size)
        self._files = files
        self._parts: dict[int, _LogFile] = {}
        self._synced = 0
        self.end = 0

    def __repr__(self) -> str:
        return f"<TimerLog {self._directory} {self.start}..{self.end}>"

    @property
    def start(self) -> int:
        """The position of the first unit that is left."""
        return next(iter(self._parts), 0)

    def load(self) -> None:
        """Open the files that are there; `end` is the start until `set_end` is called.

        Files behind one that is missing, or has another size, are removed: the log can be made again.
        """
        self._parts.clear()
        paths = [path for path in self._directory.glob("*") if path.name.isdecimal()]
        for path in sorted(paths, key=lambda one: int(one.name)):
            following = next(reversed(self._parts), int(path.name) - self._file_size) + self._file_size
            if int(path.name) != following or path.stat().st_size != self._file_size:
                if self._writable:
                    log.warning("file of the timer log removed path=%s reason=does not continue the log", path)
                    self._files.remove(path)
                continue
            self._parts[following] = _LogFile(path, self._file_size, self._files, writable=self._writable)
        self.end = self._synced = self.start

    def room(self) -> tuple[mmap.mmap, tuple[int, int, int]] | None:
        """The file that units go to next: its memory, its start, the end of the log, and where units must end.

        None before the first unit of a file.
        """
        part = self._parts.get(self.end // self._file_size * self._file_size)
        return None if part is None else (part.memory, (part.start, self.end, part.limit))

    def append(self, unit: TimerUnit) -> int:
        """Write a unit behind the last; its position."""
        position = self.end
        part = self._parts.get(position // self._file_size * self._file_size)
        at = position % self._file_size
        if part is None:
            part = self._add_file(position)
            at = 0
        elif at + UNIT.size + _BLANK.size > self._file_size:
            part.make_room(self._file_size)
            if at + _BLANK.size <= self._file_size:
                _BLANK.pack_into(part.memory, at, self._file_size - at, 0, _BLANK_MAGIC)
            position = part.start + self._file_size
            part = self._parts.get(position) or self._add_file(position)
            at = 0
        part.make_room(at + UNIT.size)
        previous, magic, write_time, delay, physical_offset, size, topic_hash = unit
        UNIT.pack_into(
            part.memory, at, UNIT.size, previous, magic, write_time, delay, physical_offset, size, topic_hash, 0
        )
        self.end = position + UNIT.size
        return position

    def read(self, position: int) -> TimerUnit | None:
        """The unit at a position; None when there is none."""
        part = self._parts.get(position // self._file_size * self._file_size)
        if part is None or position % self._file_size + UNIT.size > self._file_size:
            return None
        values = UNIT.unpack_from(part.memory, position % self._file_size)
        return TimerUnit._make(values[1:8]) if values[0] == UNIT.size and 0 < values[2] <= _MOST_MAGIC else None

    def follow(self, position: int, units: int) -> Chained:
        """Units of a chain from `position` back, at most so many; some at least, unless none is there."""
        part = self._parts.get(position // self._file_size * self._file_size)
        return (NO_POSITION, b"", b"", b"") if part is None else follow_chain(part.memory, part.start, position, units)

    def units(self, position: int, stop: int | None = None) -> Iterator[tuple[int, TimerUnit]]:
        """Units with their positions from `position` on: up to `stop`, or to the first that is none."""
        while stop is None or position < stop:
            part = self._parts.get(position // self._file_size * self._file_size)
            if part is None:
                return
            at = position % self._file_size
            if self._is_blank(part, at):
                position = part.start + self._file_size
                continue
            count = min(_SCAN_UNITS, (self._file_size - at) // UNIT.size)
            for size, *values, _ in UNIT.iter_unpack(part.memory[at : at + count * UNIT.size]):
                if stop is not None and position >= stop:
                    return
                if size != UNIT.size or not 0 < values[1] <= _MOST_MAGIC:
                    if self._is_blank(part, position % self._file_size):
                        break
                    return
                yield position, TimerUnit(*values)
                position += UNIT.size
            else:
                if count == 0:
                    position = part.start + self._file_size

    def _is_blank(self, part: _LogFile, at: int) -> bool:
        rest = self._file_size - at
        if rest < _BLANK.size:
            return True
        size, _, magic = _BLANK.unpack_from(part.memory, at)
        return bool(magic == _BLANK_MAGIC and size == rest)

    def set_end(self, position: int) -> None:
        """Let the log end here, and zeros follow."""
        self.end = self._synced = position
        for start, part in reversed(list(self._parts.items())):
            if start > position or (start == position and len(self._parts) > 1):
                self._files.remove(part.path)
                del self._parts[start]
            elif position < start + self._file_size:
                self._files.clear_from(part.path, position - start)
        if not self._parts and position:
            self.end = self._synced = position // self._file_size * self._file_size

    def clear(self) -> None:
        """Remove all units."""
        for part in self._parts.values():
            self._files.remove(part.path)
        self._parts.clear()
        self.end = self._synced = 0

    def remove_before(self, is_needed: Callable[[TimerUnit], bool]) -> int:
        """Remove the oldest files whose last unit is not needed any more; how many."""
        removed = 0
        while len(self._parts) > 1:
            start, part = next(iter(self._parts.items()))
            last = (self._file_size - _BLANK.size) // UNIT.size * UNIT.size - UNIT.size
            unit = self.read(start + last)
            if unit is not None and is_needed(unit):
                break
            self._files.remove(part.path)
            del self._parts[start]
            removed += 1
        return removed

    def sync(self, end: int) -> None:
        """Make the units before `end` safe. May run in a worker thread."""
        for start, part in list(self._parts.items()):
            if start + self._file_size > self._synced and start < end:
                with opened(self._files, part.path) as descriptor:
                    self._files.sync(descriptor)
        self._synced = max(self._synced, end)

    def check(self) -> list[str]:
        """What is wrong with the log: an empty list when nothing is."""
        problems = []
        last = self.start
        for position, unit in self.units(self.start, self.end):
            if not NO_POSITION <= unit.previous < position:
                problems.append(f"timer log: the unit at {position} follows {unit.previous}, which is not before it")
            last = position + UNIT.size
        if last < self.end and self.end - last > UNIT.size + _BLANK.size:
            problems.append(f"timer log: no unit at {last}, the log ends at {self.end}")
        for start, part in self._parts.items():
            at = max(0, self.end - start)
            if at < self._file_size and self.end >= start and any(part.memory[at : at + UNIT.size]):
                problems.append(f"timer log: bytes behind its end at {self.end}")
        return problems

    def _add_file(self, position: int) -> _LogFile:
        start = position // self._file_size * self._file_size
        path = self._directory / f"{start:0{_NAME_DIGITS}d}"
        self._files.create(path, self._file_size)
        self._files.sync_directory(self._directory)
        if not self._parts:
            self._files.sync_directory(self._directory.parent)
        part = self._parts[start] = _LogFile(path, self._file_size, self._files, writable=True)
        return part
