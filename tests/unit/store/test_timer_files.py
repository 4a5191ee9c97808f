"""The files of timer messages, byte for byte, and what is done when one of them is not as it should be."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from downrange.model.hashing import java_hash
from downrange.store.files import OS_FILES
from downrange.store.timer.timer_checkpoint import TimerCheckpoint, write_checkpoint
from downrange.store.timer.timer_index import TimedRecord, TimerIndex, TimerTopic
from downrange.store.timer.timer_log import MAGIC_DELETE, TimerLog, TimerUnit
from downrange.store.timer.timer_wheel import SLOTS, TimerWheel
from tests.unit.store.small_store import small_config

NOW = 1_700_000_000_000
UNIT_HEX = (
    "00000034 ffffffffffffffff 00000001 0000018bcfe56800 00001388 00000000000003e8 000000fa 95a7c515 0000000000000000"
)
FEW_SLOTS = 4096


def record(number: int, out_time: int, store_time: int = NOW, *, is_delete: bool = False) -> TimedRecord:
    return TimedRecord(out_time, store_time, 1000 * number, 250, java_hash("TopicD"), is_delete)


def topic(records: int) -> TimerTopic:
    """A timer topic with so many records, of a thousand bytes each."""
    return TimerTopic(0, records, 1000 * records, NOW if records else -1, lambda offset: offset // 1000)


def new_index(root: Path, slots: int = FEW_SLOTS, **changes: Any) -> TimerIndex:
    return TimerIndex(small_config(root, **changes), OS_FILES, slots)


def open_index(root: Path, records: int = 0, *, is_intact: bool = True, now: int = NOW, **changes: Any) -> TimerIndex:
    index = new_index(root, **changes)
    index.load(topic(records), now, is_intact=is_intact)
    return index


def due(index: TimerIndex, until: int = NOW + 3_600_000) -> list[tuple[int, int]]:
    """Tick and physical offset of everything on the wheel, in the order of delivery."""
    found = []
    time = index.read_time
    while time < until:
        chain = index.chain(time)
        if chain is not None:
            assert chain.read(1_000_000)
            found += [(time, physical_offset) for physical_offset in reversed(chain.messages[::2])]
        time += index.precision
    return found


def test_a_unit_is_written_as_rocketmq_writes_it(tmp_path: Path) -> None:
    log = TimerLog(tmp_path, 4096, OS_FILES)
    unit = TimerUnit(-1, 1, NOW, 5000, 1000, 250, java_hash("TopicD"))
    assert log.append(unit) == 0
    assert (tmp_path / "00000000000000000000").read_bytes()[:52] == bytes.fromhex(UNIT_HEX)
    assert log.read(0) == unit


def test_a_slot_is_written_as_rocketmq_writes_it(tmp_path: Path) -> None:
    wheel = TimerWheel(tmp_path / "timerwheel", OS_FILES)
    wheel.put(1_700_000_005, 0, 1)
    raw = (tmp_path / "timerwheel").read_bytes()
    assert len(raw) == 38_707_200
    assert raw[16_384_160:16_384_192].hex() == "000000006553f105" + "00" * 16 + "00000001" + "00000000"


def test_a_slot_of_an_earlier_turn_of_the_wheel_is_empty(tmp_path: Path) -> None:
    wheel = TimerWheel(tmp_path / "timerwheel", OS_FILES, FEW_SLOTS)
    wheel.put(10, 52, 1)
    assert wheel.get(10 + FEW_SLOTS) is None
    wheel.put(10 + FEW_SLOTS, 104, 1)
    slot = wheel.get(10 + FEW_SLOTS)
    assert slot is not None
    assert (slot.first, slot.last, slot.waiting) == (104, 104, 1)
    assert wheel.get(10) is None


def test_a_file_of_100_mib_ends_as_rocketmq_ends_it(tmp_path: Path) -> None:
    size = 100 << 20
    log = TimerLog(tmp_path, size, OS_FILES)
    log.append(TimerUnit(-1, 1, NOW, 0, 0, 1, 0))
    log.end = 104_857_532
    assert log.append(TimerUnit(-1, 1, NOW, 0, 1, 1, 0)) == 104_857_532
    assert log.append(TimerUnit(-1, 1, NOW, 0, 2, 1, 0)) == size
    tail = (tmp_path / "00000000000000000000").read_bytes()[-16:]
    assert tail == struct.pack(">iqI", 16, 0, 0xCBD43194)


def test_units_are_read_across_files(tmp_path: Path) -> None:
    log = TimerLog(tmp_path, 1024, OS_FILES)
    positions = [log.append(TimerUnit(-1, 1, NOW, 0, number, 1, 0)) for number in range(50)]
    assert [(at, unit.physical_offset) for at, unit in log.units(0)] == list(zip(positions, range(50), strict=True))
    again = TimerLog(tmp_path, 1024, OS_FILES)
    again.load()
    assert [unit.physical_offset for _, unit in again.units(positions[30])] == list(range(30, 50))
    again.set_end(positions[20])
    assert [unit.physical_offset for _, unit in again.units(0)] == list(range(20))
    assert again.check() == []
    assert again.append(TimerUnit(-1, 1, NOW, 0, 99, 1, 0)) == positions[20]


def test_what_is_behind_a_missing_file_is_removed(tmp_path: Path) -> None:
    log = TimerLog(tmp_path, 1024, OS_FILES)
    for number in range(80):
        log.append(TimerUnit(-1, 1, NOW, 0, number, 1, 0))
    (tmp_path / "00000000000000001024").unlink()
    (tmp_path / "00000000000000004096").write_bytes(b"short")
    again = TimerLog(tmp_path, 1024, OS_FILES)
    again.load()
    assert [unit.physical_offset for _, unit in again.units(0)] == list(range(19))
    assert [path.name for path in tmp_path.iterdir()] == ["00000000000000000000"]


def test_files_whose_records_are_gone_are_removed(tmp_path: Path) -> None:
    index = open_index(tmp_path, mapped_file_size_timer_log=1024)
    for number in range(60):
        assert index.put(record(number, NOW + 5000), index.read_time)
    assert index.remove_expired(30_000) == 1
    assert index.log.start == 1024
    assert [offset for _, offset in due(index)] == [1000 * number for number in range(19, 60)]
    assert index.check() == []


def test_messages_of_a_tick_come_in_their_order(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for number, seconds in enumerate((5, 3, 5, 4, 5)):
        assert index.put(record(number, NOW + 1000 * seconds), index.read_time)
    assert due(index) == [
        (NOW + 3000, 1000), (NOW + 4000, 3000), (NOW + 5000, 0), (NOW + 5000, 2000), (NOW + 5000, 4000)
    ]  # fmt: skip


def test_a_message_beyond_the_window_goes_as_far_as_rocketmq_puts_it(tmp_path: Path) -> None:
    """As captured with timerRollWindowSlot=12: 20 s ahead are put at 12, 14 s at 6, and 12 s are rolled, too."""
    index = open_index(tmp_path, timer_roll_window_slot=12)
    for number, seconds in enumerate((20, 14, 12, 11, 16)):
        assert index.put(record(number, NOW + 1000 * seconds), index.read_time)
    slots = [((unit.slot_time - NOW) // 1000, unit.magic) for _, unit in index.log.units(0)]
    assert slots == [(12, 3), (6, 3), (6, 3), (11, 1), (12, 3)]


def test_a_deletion_counts_down(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.put(record(0, NOW + 5000, is_delete=True), index.read_time)
    index.put(record(1, NOW + 5000), index.read_time)
    index.put(record(2, NOW + 5000, is_delete=True), index.read_time)
    assert index.count_at(NOW + 5000) == -1
    assert [unit.magic for _, unit in index.log.units(0)] == [1 | MAGIC_DELETE, 1, 1 | MAGIC_DELETE]
    assert due(index) == [(NOW + 5000, 1000)]


def test_a_late_message_goes_to_the_next_tick(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    index.put(record(0, NOW - 5000, NOW - 9000), index.read_time + 1000)
    assert due(index) == [(NOW + 1000, 0)]


def test_the_wheel_does_not_overtake_itself(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    assert index.put(record(0, NOW + 1000 * (FEW_SLOTS - 1)), index.read_time)
    assert not index.put(record(1, NOW + 1000 * FEW_SLOTS), index.read_time)
    index.read_time += 1000
    assert index.put(record(1, NOW + 1000 * FEW_SLOTS), index.read_time)
    assert SLOTS == 1_209_600


# --- opening again ------------------------------------------------------------------------------------------------


def filled(root: Path, count: int = 40, saved: int = 25, **changes: Any) -> TimerIndex:
    """An index with `count` messages, of which the first ones are in the checkpoint."""
    index = open_index(root, mapped_file_size_timer_log=1024, **changes)
    for number in range(count):
        assert index.put(record(number, NOW + 1000 * (1 + number % 7)), index.read_time)
        if number + 1 == saved:
            index.flush(index.checkpoint(NOW))
    return index


def test_a_process_that_died_left_everything(tmp_path: Path) -> None:
    before = filled(tmp_path)
    index = open_index(tmp_path, 40, mapped_file_size_timer_log=1024)
    assert due(index) == due(before)
    assert index.queue_offset == 40
    assert index.check() == []


def test_a_unit_that_is_not_in_its_slot_is_put_there(tmp_path: Path) -> None:
    before = filled(tmp_path)
    unit = TimerUnit(-1, 1, NOW, 9000, 40_000, 250, 0)
    before.log.append(unit)  # and the process dies
    index = open_index(tmp_path, 41, mapped_file_size_timer_log=1024)
    assert due(index)[-1] == (NOW + 9000, 40_000)
    assert index.queue_offset == 41


def test_a_unit_without_its_record_is_cut_off(tmp_path: Path) -> None:
    filled(tmp_path)
    index = open_index(tmp_path, 35, mapped_file_size_timer_log=1024)
    assert index.queue_offset == 35
    assert len(due(index)) == 35
    assert index.check() == []


def test_after_a_power_cut_only_what_was_synced_counts(tmp_path: Path) -> None:
    filled(tmp_path)
    index = open_index(tmp_path, 40, is_intact=False, mapped_file_size_timer_log=1024)
    assert index.queue_offset == 25
    assert sorted(offset for _, offset in due(index)) == [1000 * number for number in range(25)]
    for number in range(25, 40):
        assert index.put(record(number, NOW + 1000 * (1 + number % 7)), index.read_time)
    assert index.check() == []


@pytest.mark.parametrize("name", ["timerwheel", "timerlog", "config/timercheck"])
def test_a_file_that_was_deleted_is_made_again(tmp_path: Path, name: str) -> None:
    before = due(filled(tmp_path, saved=40))
    for path in [tmp_path / name, *(tmp_path / name).glob("*")]:
        if path.is_file():
            path.unlink()
    index = open_index(tmp_path, 40, mapped_file_size_timer_log=1024)
    while index.queue_offset < 40:
        number = index.queue_offset
        assert index.put(record(number, NOW + 1000 * (1 + number % 7)), index.read_time)
    assert due(index) == before
    assert index.check() == []


def test_what_was_due_before_a_lost_log_is_not_due_again(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for number in range(4):
        index.put(record(number, NOW + 1000 * number * 100), index.read_time)
    index.read_time = NOW + 150_000
    index.flush(index.checkpoint(NOW + 150_000))
    for path in (tmp_path / "timerlog").iterdir():
        path.unlink()
    index = open_index(tmp_path, 4, now=NOW + 200_000)
    while index.queue_offset < 4:
        number = index.queue_offset
        assert index.put(record(number, NOW + 1000 * number * 100), index.read_time)
    # The second one may have been delivered: it is in the slack, and is looked for in its topic.
    assert [offset for _, offset in due(index)] == [1000, 2000, 3000]


def test_another_precision_makes_the_wheel_again(tmp_path: Path) -> None:
    index = filled(tmp_path)
    index.flush(index.checkpoint(NOW))
    before = due(index)
    index = open_index(tmp_path, 40, mapped_file_size_timer_log=1024, timer_precision_ms=200)
    assert index.precision == 200
    while index.queue_offset < 40:
        number = index.queue_offset
        assert index.put(record(number, NOW + 1000 * (1 + number % 7)), index.read_time)
    assert due(index) == before


def test_the_checkpoint_is_rocketmqs_and_a_little_more(tmp_path: Path) -> None:
    checkpoint = TimerCheckpoint(1_794_809_572_000, 6760, 131, 131, 0, 1_794_809_572_522, 309, 1000)
    write_checkpoint(checkpoint, tmp_path / "timercheck", OS_FILES)
    raw = (tmp_path / "timercheck").read_bytes()
    assert len(raw) == 4096
    assert struct.unpack(">7q", raw[:56]) == (1_794_809_572_000, 6760, 131, 131, 0, 1_794_809_572_522, 309)
    assert TimerCheckpoint.load(tmp_path / "timercheck") == checkpoint
    assert TimerCheckpoint.decode(raw[:56]) == TimerCheckpoint(*struct.unpack(">7q", raw[:56]))
    assert TimerCheckpoint.decode(bytes(4096)) is None
    assert TimerCheckpoint.load(tmp_path / "missing") is None


def test_damage_is_found(tmp_path: Path) -> None:
    index = filled(tmp_path)
    assert index.check() == []
    index.wheel.put((NOW + 9000) // 1000, 999_999, 1)
    assert "slot" in index.check()[0]
    index.log.append(TimerUnit(1 << 40, 1, NOW, 0, 0, 1, 0))
    assert any("which is not before it" in problem for problem in index.check())
