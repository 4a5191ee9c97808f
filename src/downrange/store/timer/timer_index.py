"""Which records of the timer topic are due when: wheel, timer log and checkpoint put together.

The truth is the timer topic in the commit log. This index is derived from it: where a record goes follows from the
record alone (its TIMER_OUT_MS and store time), so that a part that was lost is made again as it was.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from downrange.store.config import StoreConfig
from downrange.store.files import OS_FILES, Files
from downrange.store.timer.timed_records import Timed, put_units
from downrange.store.timer.timer_checkpoint import TimerCheckpoint, write_checkpoint
from downrange.store.timer.timer_log import (
    MAGIC_DEFAULT,
    MAGIC_DELETE,
    MAGIC_ROLL,
    NO_POSITION,
    UNIT,
    TimerLog,
    TimerUnit,
)
from downrange.store.timer.timer_wheel import SLOTS, TimerWheel

log = logging.getLogger(__name__)

# A read time that somebody else kept (a master, or a checkpoint whose index is lost) is not trusted to the tick:
# messages that were taken in late may have been put into the slots before it.
_SLACK_MILLIS: Final = 60_000


class TimedRecord(NamedTuple):
    """What the index keeps of one record of the timer topic."""

    out_time: int
    """TIMER_OUT_MS."""
    store_time: int
    physical_offset: int
    size: int
    topic_hash: int
    is_delete: bool


@dataclass(frozen=True, slots=True)
class TimerTopic:
    """What recovery needs to know of the timer topic and the log it lies in."""

    min_offset: int
    max_offset: int
    log_max_offset: int
    """The end of the commit log."""
    earliest_store_time: int
    """Of the first message of the topic; -1 when there is none."""
    queue_offset_at: Callable[[int], int | None]
    """The queue offset of the record of the timer topic at a physical offset; None when there is none."""


class SlotChain:
    """The units of one slot, from the last that was put there to the first.

    `messages` and `rolls` (messages that are to be put on the wheel again) have two numbers for each unit: the physical
    offset of its record, and the time when it was put on the wheel. `deletes` has the physical offsets only. All are
    read in portions: a slot may have millions of units.
    """

    __slots__ = ("_log", "_position", "deletes", "messages", "rolls")

    def __init__(self, log: TimerLog, last: int) -> None:
        self._log = log
        self._position = last
        self.messages = array("q")
        self.rolls = array("q")
        self.deletes = array("q")

    def read(self, units: int) -> bool:
        """Follow the chain by at most so many units; whether its beginning was reached."""
        before = self._length
        while self._position != NO_POSITION and (left := units - self._length + before) > 0:
            self._position, messages, rolls, deletes = self._log.follow(self._position, left)
            self.messages.frombytes(messages)
            self.rolls.frombytes(rolls)
            self.deletes.frombytes(deletes)
        return self._position == NO_POSITION

    @property
    def _length(self) -> int:
        return len(self.messages) // 2 + len(self.rolls) // 2 + len(self.deletes)


class TimerIndex:
    """The index of one broker's timer messages.

    Holds always: what is due before `read_time` was delivered; all records before `queue_offset` of the timer topic are
    in the index. One thread changes it; `flush` may run beside that one.
    """

    def __init__(self, config: StoreConfig, files: Files = OS_FILES, slots: int = SLOTS) -> None:
        root = config.store_path_root_dir
        self.precision = config.timer_precision
        self._window = config.timer_roll_window * self.precision
        self._rest = config.timer_roll_window // 3 * self.precision
        self._half_window = config.timer_roll_window // 2 * self.precision
        self._files = files
        self._checkpoint_path: Path = root / "config" / "timercheck"
        self._counter = 0
        self.log = TimerLog(root / "timerlog", config.mapped_file_size_timer_log, files)
        self.wheel = TimerWheel(root / "timerwheel", files, slots)
        self.read_time = 0
        """The first tick that is not delivered yet."""
        self.queue_offset = 0
        self.redelivered_from = 0
        """Messages that were stored from this time on may be copies of messages that are in the index."""
        self._taken_before = 0
        """Records before this queue offset were in an index that is lost: those that were due then are delivered."""

    def __repr__(self) -> str:
        return f"<TimerIndex read_time={self.read_time} queue_offset={self.queue_offset} {self.log!r}>"

    def floor(self, time: int) -> int:
        """The tick in which a time lies."""
        return time - time % self.precision

    # --- opening --------------------------------------------------------------------------------------------------

    def load(self, topic: TimerTopic, now: int, *, is_intact: bool) -> None:
        """Open the index. `is_intact`: the machine has not stopped since it was written, so all of it is there."""
        checkpoint = TimerCheckpoint.load(self._checkpoint_path)
        self.log.load()
        has_wheel = self.wheel.load()
        if checkpoint is None:
            self._start_over(topic, now)
            return
        self._counter = checkpoint.counter
        self.read_time, self.queue_offset = self.floor(checkpoint.read_time), checkpoint.queue_offset
        is_lost = checkpoint.log_end > 0 and not self._has(checkpoint.log_end)
        if is_lost or checkpoint.precision not in (0, self.precision):  # chains are made for one precision
            log.warning("timer log lost, it is made again from the timer topic log_end=%d", checkpoint.log_end)
            self.make_again(topic)
        elif is_intact:
            self._read_tail(topic, checkpoint.log_end)
        else:
            self.log.set_end(checkpoint.log_end)
            self._go_back(topic)
        is_odd = not is_intact or not has_wheel or self.wheel.last_position >= self.log.end
        if self.log.end > self.log.start and is_odd:
            self._rebuild_wheel()
        self.queue_offset = max(topic.min_offset, min(self.queue_offset, topic.max_offset))
        self.redelivered_from = self.read_time

    def make_again(self, topic: TimerTopic) -> None:
        """Forget everything but what was delivered, and take the timer topic in again from its first message on."""
        self.read_time = self.redelivered_from = self.floor(max(0, self.read_time - _SLACK_MILLIS))
        self._clear()
        self._taken_before, self.queue_offset = min(self.queue_offset, topic.max_offset), topic.min_offset

    def _has(self, position: int) -> bool:
        """Whether the log has a unit just before this position."""
        return self.log.start == position or self.log.read(position - UNIT.size) is not None

    def _start_over(self, topic: TimerTopic, now: int) -> None:
        """There is no checkpoint: what was delivered is found out by comparing all of it."""
        self._clear()
        self.queue_offset = topic.min_offset
        oldest = topic.earliest_store_time
        self.read_time = self.floor(oldest if 0 <= oldest < now else now)
        self.redelivered_from = self.read_time

    def _clear(self) -> None:
        self.log.clear()
        self.wheel.clear()

    def _read_tail(self, topic: TimerTopic, position: int) -> None:
        """Find the end of the log, from the checkpoint on, and complete the slots of the last units."""
        last: TimerUnit | None = None
        end = position
        for at, unit in self.log.units(position):
            if unit.physical_offset + unit.size > topic.log_max_offset:
                break
            slot = self.wheel.get(unit.slot_time // self.precision)
            if slot is None or slot.last < at:
                self._link(at, unit)
            last, end = unit, at + UNIT.size
        self.log.set_end(end)
        found = topic.queue_offset_at(last.physical_offset) if last is not None else None
        if found is not None:
            self.queue_offset = max(self.queue_offset, found + 1)

    def _go_back(self, topic: TimerTopic) -> None:
        """Take in again what is not in the log. RocketMQ's checkpoint may count a little more than its log has safe."""
        last = self.log.read(self.log.end - UNIT.size) if self.log.end > self.log.start else None
        found = topic.queue_offset_at(last.physical_offset) if last is not None else None
        if found is not None:
            self.queue_offset = min(self.queue_offset, found + 1)
        elif self.log.end == 0:
            self.queue_offset = topic.min_offset

    def _rebuild_wheel(self) -> None:
        log.warning("timer wheel is made again from the timer log end=%d", self.log.end)
        self.wheel.clear()
        first_tick = self.read_time // self.precision
        for at, unit in self.log.units(self.log.start, self.log.end):
            if unit.slot_time // self.precision >= first_tick:
                self._link(at, unit)

    def _link(self, position: int, unit: TimerUnit) -> None:
        self.wheel.put(unit.slot_time // self.precision, position, -1 if unit.magic & MAGIC_DELETE else 1)

    # --- putting and taking ---------------------------------------------------------------------------------------

    def put(self, record: TimedRecord, earliest: int) -> bool:
        """Put the record at `queue_offset` on the wheel, not before the tick `earliest`, and count it.

        False when the wheel has no room so far ahead: what is overdue has to be delivered first.
        """
        write_time = self.floor(record.store_time)
        slot_time, magic = record.out_time, MAGIC_DEFAULT
        ahead = slot_time - write_time
        if ahead >= self._window:
            magic |= MAGIC_ROLL
            slot_time = write_time + (self._half_window if ahead - self._window < self._rest else self._window)
        if record.is_delete:
            magic |= MAGIC_DELETE
        slot_time = self.floor(slot_time)
        if slot_time < earliest:
            if self.queue_offset < self._taken_before and slot_time < self.read_time:
                self.queue_offset += 1  # it was delivered, or stored again on its way
                return True
            slot_time = earliest
        if slot_time - self.read_time >= self.wheel.slots * self.precision:
            return False
        tick = slot_time // self.precision
        slot = self.wheel.get(tick)
        previous = slot.last if slot is not None else NO_POSITION
        unit = TimerUnit(
            previous, magic, write_time, slot_time - write_time, record.physical_offset, record.size, record.topic_hash
        )
        self._link(self.log.append(unit), unit)
        self.queue_offset += 1
        return True

    def put_each(self, records: list[Timed], earliest: int) -> None:
        """`put` for many records, up to the first for which the wheel has no room: `queue_offset` says how many."""
        number = 0
        while number < len(records):
            if self.queue_offset >= self._taken_before and (room := self.log.room()) is not None:
                part, places = room
                wheel = self.wheel
                rules = self.precision, self._window, self._rest, self._half_window, earliest, self.read_time
                reached, self.log.end, wheel.last_tick = put_units(
                    records, number, wheel.memory, (wheel.slots, wheel.last_tick), part, places, rules
                )
                self.queue_offset += reached - number
                number = reached
            if number < len(records):
                if not self.put(TimedRecord(*records[number][:6]), earliest):
                    break
                number += 1

    def chain(self, time: int) -> SlotChain | None:
        """The units of the slot of a tick; None when nothing is due in it."""
        slot = self.wheel.get(time // self.precision)
        return SlotChain(self.log, slot.last) if slot is not None else None

    def count_at(self, time: int) -> int:
        """How many messages wait for a tick."""
        slot = self.wheel.get(time // self.precision)
        return slot.waiting if slot is not None else 0

    def next_time(self, stop: int) -> int:
        """The first tick from `read_time` on that has a slot, or `stop`."""
        if self.wheel.last_tick * self.precision < self.read_time:
            return stop
        time, get, precision = self.read_time, self.wheel.get, self.precision
        while time < stop and get(time // precision) is None:
            time += precision
        return time

    # --- saving ---------------------------------------------------------------------------------------------------

    def follow(self, master: TimerCheckpoint) -> None:
        """A slave learns how far its master has delivered."""
        self.read_time = max(self.read_time, self.floor(master.read_time - _SLACK_MILLIS))
        self.redelivered_from = self.read_time

    def checkpoint(self, now: int) -> TimerCheckpoint:
        """A checkpoint of this moment; to be written once the timer log is safe up to its present end."""
        self._counter += 1
        return TimerCheckpoint(
            self.read_time, self.log.end, self.queue_offset, self.queue_offset, 0, now, self._counter, self.precision
        )

    def flush(self, checkpoint: TimerCheckpoint) -> None:
        """Make all that a checkpoint speaks of safe, then the checkpoint. May run in a worker thread."""
        self.log.sync(checkpoint.log_end)
        self.wheel.sync()
        write_checkpoint(checkpoint, self._checkpoint_path, self._files)

    def remove_expired(self, min_offset: int) -> int:
        """Remove files of the timer log whose records are no longer in the commit log; how many."""
        return self.log.remove_before(lambda unit: unit.physical_offset >= min_offset)

    def check(self) -> list[str]:
        """What is wrong with wheel and log: an empty list when nothing is."""
        tick = self.read_time // self.precision
        return self.log.check() + self.wheel.check(self.log.start, self.log.end, tick)
