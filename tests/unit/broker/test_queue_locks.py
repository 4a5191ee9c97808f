from __future__ import annotations

from downrange.broker.queue_locks import LOCK_LIVES_MILLIS, QueueLocks
from downrange.model.message import MessageQueue

FIRST, SECOND = MessageQueue("TopicTest", "broker-a", 0), MessageQueue("TopicTest", "broker-a", 1)
NOW = 1_700_000_000_000


def test_a_queue_is_held_by_who_asks_first() -> None:
    locks = QueueLocks()
    assert locks.lock("g", "one", [FIRST], NOW) == [FIRST]
    assert locks.lock("g", "two", [FIRST, SECOND], NOW) == [SECOND]
    assert locks.is_locked("g", FIRST, NOW)


def test_groups_do_not_disturb_each_other() -> None:
    locks = QueueLocks()
    assert locks.lock("g", "one", [FIRST], NOW) == [FIRST]
    assert locks.lock("h", "two", [FIRST], NOW) == [FIRST]


def test_a_lock_lives_a_minute_after_it_was_asked_for_last() -> None:
    locks = QueueLocks()
    locks.lock("g", "one", [FIRST], NOW)
    assert locks.lock("g", "one", [FIRST], NOW + 30_000) == [FIRST]
    last = NOW + 30_000 + LOCK_LIVES_MILLIS
    assert locks.lock("g", "two", [FIRST], last) == []
    assert locks.is_locked("g", FIRST, last)
    assert not locks.is_locked("g", FIRST, last + 1)
    assert locks.lock("g", "two", [FIRST], last + 1) == [FIRST]
    assert locks.lock("g", "one", [FIRST], last + 1) == []


def test_its_holder_may_take_an_expired_lock_again() -> None:
    locks = QueueLocks()
    locks.lock("g", "one", [FIRST], NOW)
    assert locks.lock("g", "one", [FIRST], NOW + 2 * LOCK_LIVES_MILLIS) == [FIRST]


def test_only_its_holder_lets_a_queue_go() -> None:
    locks = QueueLocks()
    locks.lock("g", "one", [FIRST, SECOND], NOW)
    locks.unlock("g", "two", [FIRST])
    assert locks.is_locked("g", FIRST, NOW)
    locks.unlock("g", "one", [FIRST])
    assert not locks.is_locked("g", FIRST, NOW)
    assert locks.is_locked("g", SECOND, NOW)
    locks.unlock("g", "one", [SECOND])
    locks.unlock("nobody", "one", [SECOND])
    assert locks.lock("g", "two", [FIRST, SECOND], NOW) == [FIRST, SECOND]
