from __future__ import annotations

from pathlib import Path

import pytest

from downrange.broker.json_file import JsonFile
from downrange.broker.queue_locks import LOCK_LIVES_MILLIS, QueueLocks
from downrange.model.message import MessageQueue

FIRST, SECOND = MessageQueue("TopicTest", "broker-a", 0), MessageQueue("TopicTest", "broker-a", 1)
NOW = 1_700_000_000_000


def saved_locks(directory: Path, now: int) -> QueueLocks:
    return QueueLocks(JsonFile(directory / "queueLocks.json"), now)


@pytest.fixture
def locks(tmp_path: Path) -> QueueLocks:
    return saved_locks(tmp_path, NOW)


def test_a_queue_is_held_by_who_asks_first(locks: QueueLocks) -> None:
    assert locks.lock("g", "one", [FIRST], NOW) == [FIRST]
    assert locks.lock("g", "two", [FIRST, SECOND], NOW) == [SECOND]
    assert locks.is_locked("g", FIRST, NOW)


def test_groups_do_not_disturb_each_other(locks: QueueLocks) -> None:
    assert locks.lock("g", "one", [FIRST], NOW) == [FIRST]
    assert locks.lock("h", "two", [FIRST], NOW) == [FIRST]


def test_a_lock_lives_a_minute_after_it_was_asked_for_last(locks: QueueLocks) -> None:
    locks.lock("g", "one", [FIRST], NOW)
    assert locks.lock("g", "one", [FIRST], NOW + 30_000) == [FIRST]
    last = NOW + 30_000 + LOCK_LIVES_MILLIS
    assert locks.lock("g", "two", [FIRST], last) == []
    assert locks.is_locked("g", FIRST, last)
    assert not locks.is_locked("g", FIRST, last + 1)
    assert locks.lock("g", "two", [FIRST], last + 1) == [FIRST]
    assert locks.lock("g", "one", [FIRST], last + 1) == []


def test_its_holder_may_take_an_expired_lock_again(locks: QueueLocks) -> None:
    locks.lock("g", "one", [FIRST], NOW)
    assert locks.lock("g", "one", [FIRST], NOW + 2 * LOCK_LIVES_MILLIS) == [FIRST]


def test_only_its_holder_lets_a_queue_go(locks: QueueLocks) -> None:
    locks.lock("g", "one", [FIRST, SECOND], NOW)
    locks.unlock("g", "two", [FIRST])
    assert locks.is_locked("g", FIRST, NOW)
    locks.unlock("g", "one", [FIRST])
    assert not locks.is_locked("g", FIRST, NOW)
    assert locks.is_locked("g", SECOND, NOW)
    locks.unlock("g", "one", [SECOND])
    locks.unlock("nobody", "one", [SECOND])
    assert locks.lock("g", "two", [FIRST, SECOND], NOW) == [FIRST, SECOND]


def test_locks_outlive_the_broker(tmp_path: Path) -> None:
    """Found by the simulation (seed 22): a broker that was started again gave a held queue to a second consumer."""
    locks = saved_locks(tmp_path, NOW)
    locks.lock("g", "one", [FIRST], NOW)
    locks.lock("g", "two", [SECOND], NOW)
    locks.save()
    started = NOW + 10 * LOCK_LIVES_MILLIS
    locks = saved_locks(tmp_path, started)
    assert locks.lock("g", "two", [FIRST, SECOND], started + LOCK_LIVES_MILLIS) == [SECOND]
    assert locks.lock("g", "one", [FIRST], started + LOCK_LIVES_MILLIS) == [FIRST]


def test_a_queue_that_was_let_go_is_free_after_a_restart(tmp_path: Path) -> None:
    locks = saved_locks(tmp_path, NOW)
    locks.lock("g", "one", [FIRST], NOW)
    locks.save()
    locks.unlock("g", "one", [FIRST])
    locks.save()
    assert saved_locks(tmp_path, NOW).lock("g", "two", [FIRST], NOW) == [FIRST]
