"""The store directory of a genuine 5.3.3 broker with timer messages that wait: ours delivers them when they are due."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.app import broker
from downrange.broker.config import BrokerConfig
from downrange.broker.services.timer import TimerService
from downrange.clock import ManualClock
from downrange.model.hashing import java_hash
from downrange.model.topics import TIMER_TOPIC
from downrange.store.check.check_timer import timer_problems
from downrange.store.config import StoreConfig
from downrange.store.files import OS_FILES
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.store.timer.timer_log import TimerLog, TimerUnit
from downrange.store.timer.timer_wheel import SLOT, TimerWheel
from tests.support.golden_store import GoldenStore, unpack
from tests.unit.store.small_store import read_all

STOPPED = 1_794_809_576_000
# Topic, body, and when the sender wanted it: all that was sent, and neither delivered nor recalled.
PENDING = [
    ("TimerDel", b"after-restart", 1_794_809_639_300),
    ("TimerPending", b"p3600", 1_794_811_842_210),
]
ALL_OF = {"TimerDel": [b"kept", b"after-restart"], "TimerPending": [b"p40", b"p55", b"p3600"]}


@pytest.fixture
def golden(tmp_path: Path) -> GoldenStore:
    return unpack("timer533", tmp_path)


def settings_of(golden: GoldenStore, **changes: Any) -> StoreConfig:
    sizes = {
        "mapped_file_size_commit_log": golden.setting("mappedFileSizeCommitLog"),
        "mapped_file_size_consume_queue": golden.setting("mappedFileSizeConsumeQueue"),
        "mapped_file_size_timer_log": golden.setting("mappedFileSizeTimerLog"),
        "max_hash_slot_num": golden.setting("maxHashSlotNum"),
        "max_index_num": golden.setting("maxIndexNum"),
        "timer_roll_window_slot": golden.setting("timerRollWindowSlot"),
    }
    return StoreConfig(store_path_root_dir=golden.root, **(sizes | changes))


def test_the_captured_files_are_read_and_written_again_byte_for_byte(golden: GoldenStore, tmp_path: Path) -> None:
    size = golden.setting("mappedFileSizeTimerLog")
    log = TimerLog(golden.root / "timerlog", size, OS_FILES)
    log.load()
    units = list(log.units(0))
    assert len(units) == 131
    again = TimerLog(tmp_path / "again", size, OS_FILES)
    wheel = TimerWheel(tmp_path / "wheel", OS_FILES)
    for position, unit in units:
        slot = wheel.get(unit.slot_time // 1000)
        assert unit.previous == (slot.last if slot is not None else -1)
        assert again.append(TimerUnit(*unit)) == position
        wheel.put(unit.slot_time // 1000, position, -1 if unit.magic & 4 else 1)
        assert unit.topic_hash in {java_hash(topic) for topic in (*ALL_OF, "TimerTopic", "TimerRecall", "TimerDelete",
                                                                   "RMQ_SYS_TRANS_HALF_TOPIC")}  # fmt: skip
    name = "00000000000000000000"
    assert (tmp_path / "again" / name).read_bytes() == (golden.root / "timerlog" / name).read_bytes()
    captured = TimerWheel(golden.root / "timerwheel", OS_FILES)
    assert captured.load()
    ours, theirs = (tmp_path / "wheel").read_bytes(), (golden.root / "timerwheel").read_bytes()
    for at in range(0, len(ours), SLOT.size):
        mine, their = SLOT.unpack_from(ours, at), SLOT.unpack_from(theirs, at)
        # The genuine broker had started several times; then it counts some messages once more, and the last unit was
        # not in its slot when it died.
        if their[0]:
            assert mine[:3] == their[:3]
        elif mine[0]:
            assert mine[0] == 1_794_809_584


def test_the_captured_index_is_in_order_and_damage_is_told(golden: GoldenStore) -> None:
    assert timer_problems(golden.root) == []
    wheel = golden.root / "timerwheel"
    data = bytearray(wheel.read_bytes())
    tick = 1_794_809_584
    at = tick % 1_209_600 * SLOT.size
    SLOT.pack_into(data, at, tick, 0, 99_999, 1, 0)
    wheel.write_bytes(data)
    assert timer_problems(golden.root) == [
        f"timer wheel: slot {at // SLOT.size} points to 0..99999, the timer log has 0..6812"
    ]
    wheel.unlink()
    assert "timer wheel: is missing" in timer_problems(golden.root)[0]


def test_the_captured_checkpoint_is_read(golden: GoldenStore) -> None:
    checkpoint = TimerCheckpoint.load(golden.root / "config" / "timercheck")
    assert checkpoint == TimerCheckpoint(1_794_809_572_000, 6760, 131, 131, 0, 1_794_809_572_522, 309)
    raw = (golden.root / "config" / "timercheck").read_bytes()
    assert checkpoint is not None
    assert checkpoint.encoded == raw[:56] == struct.pack(">7q", *struct.unpack(">7q", raw[:56]))


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("away", [0, 40, 7200], ids=["at once", "after 40 s", "after two hours"])
async def test_what_waits_is_delivered_when_it_is_due(golden: GoldenStore, away: int, is_killed: bool) -> None:
    clock = ManualClock(STOPPED + away * 1000)
    if is_killed:
        (golden.root / "abort").touch()
    config = BrokerConfig(broker_name="broker-a", broker_ip1="127.0.0.1", listen_port=0, metrics_port=-1)
    async with broker(config, settings_of(golden), clock) as running:
        for topic, body, due in PENDING:
            await until(clock, due - 1, running.timer)
            if due > STOPPED + away * 1000:
                assert body not in [message.body for message in read_all(running.store, topic)]
            await until(clock, max(due, STOPPED + away * 1000) + 3000, running.timer)
            assert read_all(running.store, topic)[-1].body == body
        await until(clock, 1_794_815_442_000 + 20_000, running.timer)  # when the one is due that was recalled
        for topic, bodies in ALL_OF.items():
            assert [message.body for message in read_all(running.store, topic)] == bodies
        assert running.timer.index.check() == []
        assert running.timer.enqueue_behind == 0
    assert TIMER_TOPIC in running.topics


async def until(clock: ManualClock, time: int, timer: TimerService) -> None:
    """Let the clock go on a few ticks at a time, until the timer service has done its work."""
    while clock.now() < time or timer.read_behind_millis or timer.enqueue_behind:
        await clock.advance(min(6.0, max(0, time - clock.now()) / 1000))
        while timer.read_behind_millis or timer.enqueue_behind:
            await clock.advance(0.1 if clock.now() >= time else 0)
