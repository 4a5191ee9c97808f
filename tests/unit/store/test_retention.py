from __future__ import annotations

import os
from pathlib import Path

import pytest

from downrange.clock import ManualClock
from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from downrange.store.retention import MANUAL_ROUNDS, Retention, count_expired, decide
from tests.support.stores import append
from tests.unit.store.small_store import NOW, bodies, clean_up_round, new_message, open_store, put, read_all

HOUR = 3_600_000


@pytest.mark.parametrize(
    ("hour", "log", "queue", "manual", "expected"),
    [
        (12, 0.50, 0.50, False, (False, False, False)),
        (4, 0.50, 0.50, False, (True, False, False)),
        (12, 0.75, 0.50, False, (False, False, False)),
        (12, 0.76, 0.50, False, (True, False, False)),
        (12, 0.50, 0.76, False, (True, False, False)),
        (12, 0.86, 0.50, False, (True, True, False)),
        (12, 0.91, 0.50, False, (True, True, True)),
        (12, 0.50, 0.91, False, (True, True, True)),
        (12, 0.90, 0.50, False, (True, True, False)),
        (12, -1.0, 0.50, False, (True, False, False)),
        (12, 0.50, 0.50, True, (True, False, False)),
    ],
)
def test_watermarks(hour: int, log: float, queue: float, manual: bool, expected: tuple[bool, bool, bool]) -> None:
    decision = decide(StoreConfig(), hour=hour, commit_log_use=log, queue_use=queue, manual=manual)
    assert (decision.delete, decision.forced, decision.disk_full) == expected
    assert bool(decision.reason) == decision.delete


def test_force_can_be_forbidden() -> None:
    config = StoreConfig(clean_file_forcibly_enable=False)
    decision = decide(config, hour=12, commit_log_use=0.95, queue_use=0.1)
    assert (decision.delete, decision.forced, decision.disk_full) == (True, False, True)


def test_files_expire_from_the_oldest_on_and_never_the_last() -> None:
    now = 100 * HOUR
    old, young = now - 72 * HOUR, now - 71 * HOUR
    assert count_expired([old, old, young, old, young], now, 72, forced=False) == 2
    assert count_expired([old, old], now, 72, forced=False) == 1
    assert count_expired([young, young, young], now, 72, forced=True) == 2
    assert count_expired([old] * 20, now, 72, forced=False) == 10
    assert count_expired([], now, 72, forced=False) == 0


def filled(root: Path, clock: ManualClock, count: int = 200, **changes: object) -> MessageStore:
    store = open_store(root, clock=clock, **changes)
    for number in range(count):
        put(store, b"%04d" % number * 60, properties={"KEYS": f"k{number}"})
    store.write_pending()
    return store


def age(store: MessageStore, files: int, hours: float) -> None:
    for path in sorted((store.config.store_path_root_dir / "commitlog").iterdir())[:files]:
        changed = NOW - int(hours * HOUR)
        os.utime(path, ns=(changed * 1_000_000, changed * 1_000_000))


def test_a_round_removes_expired_files_and_what_points_at_them(tmp_path: Path) -> None:
    with filled(tmp_path, ManualClock(NOW)) as store:
        age(store, 8, 73)
        retention = Retention(store, hour_of=lambda now: 4)
        deleted, dependents = clean_up_round(retention, store, NOW)
        assert len(deleted) == 8
        assert store.min_offset == 8 * 4096
        assert dependents > 0
        first = read_all(store)[0]
        assert first.physical_offset == 8 * 4096
        assert first.queue_offset == store.min_offset_of("TopicTest", 0)
        assert store.read("TopicTest", 0, 0, 1).status.name == "OFFSET_TOO_SMALL"
        assert store.query("TopicTest", "k199", 32, 0, 1 << 60).slices != []
        assert clean_up_round(retention, store, NOW)[0] == []
    with open_store(tmp_path) as store:
        assert store.recovery.warnings == []
        assert read_all(store)[0].physical_offset == 8 * 4096
        assert put(store).queue_offset == 200


def test_at_another_hour_nothing_goes_unless_asked_for(tmp_path: Path) -> None:
    with filled(tmp_path, ManualClock(NOW)) as store:
        age(store, 100, 73)
        retention = Retention(store, hour_of=lambda now: 5)
        assert clean_up_round(retention, store, NOW)[0] == []
        retention.arm_manually()
        removed = sum(len(clean_up_round(retention, store, NOW)[0]) for _ in range(MANUAL_ROUNDS))
        assert removed == len(list(store._segments)) + removed - 1
        age(store, 100, 73)
        put(store, bytes(3900))
        put(store, bytes(3900))
        assert clean_up_round(retention, store, NOW)[0] == []


def test_a_full_disk_frees_the_oldest_files_and_refuses_messages(tmp_path: Path) -> None:
    fill = 0.5
    with filled(tmp_path, ManualClock(NOW), disk_use=lambda path: fill) as store:
        retention = Retention(store, hour_of=lambda now: 5)
        fill = 0.91
        assert len(clean_up_round(retention, store, NOW)[0]) == 10
        assert append(store, new_message()).status is PutMessageStatus.SERVICE_NOT_AVAILABLE
        assert len(bodies(store)) > 0
        fill = 0.86
        clean_up_round(retention, store, NOW)
        put(store)


def test_queues_without_messages_and_unused_topics_are_removed(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, bytes(3500), topic="Old")
        put(store, bytes(3500), topic="SCHEDULE_TOPIC_XXXX")
        put(store, bytes(3500), topic="Used")
        put(store, b"x", topic="Unused", queue_id=3)
        put(store, b"x", topic="%LMQ%one")
        store.write_pending()
        store.remove_files(store.take_oldest_files(2))
        assert store.remove_expired_queues() == [("Old", 0)]
        assert store.remove_unused_topics({"Used"}) == [("Unused", 3)]
        left = {path.name for path in (tmp_path / "consumequeue").iterdir()}
        assert left == {"SCHEDULE_TOPIC_XXXX", "Used", "%LMQ%one"}
        assert store.max_offset_of("Unused", 3) == 0


def test_a_file_that_cannot_be_removed_is_reported_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filled(tmp_path, ManualClock(NOW)) as store:
        taken = store.take_oldest_files(1)
        taken[0].unlink()
        taken[0].mkdir()
        store.remove_files(taken)
        assert "cannot remove" in caplog.text
        taken[0].rmdir()
