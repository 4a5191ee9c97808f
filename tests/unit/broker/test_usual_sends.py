"""Where usual sends may go is learnt when somebody sends there, and forgotten when it changes."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.broker.handlers.usual_sends import Destinations, UsualSends
from downrange.compiled import steps
from downrange.model.topics import SCHEDULE_TOPIC, TopicConfig
from downrange.protocol.bodies.send_replies import SendReplies
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.framing import FrameDecoder
from downrange.store.new_messages import NewMessages
from tests.unit.broker.test_sends import send
from tests.unit.broker.wired import FakeConnection, WiredBroker, wire
from tests.unit.store.small_store import put

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[WiredBroker]:
    made = wire(tmp_path)
    made.topics.put(TopicConfig("orders", write_queue_nums=3))
    yield made
    made.close()


class Asked:
    """Sends of one message each, which ask for their topics as a broker's do."""

    def __init__(self, broker: WiredBroker) -> None:
        self.destinations = Destinations(broker.topics, broker.store.queues)
        self.learnt: list[str] = []
        self._usual = UsualSends(
            self.destinations.table, self._learn, broker.store.queues.by_row, b"CLUSTER\x01c", bytes(8)
        )

    def __call__(self, queue_id: int, topic: str = "orders") -> int | None:
        """The row that a message is sent to; None when the send is not usual."""
        frames, messages = FrameDecoder().frames(send(1, topic=topic, queue_id=queue_id)), NewMessages()
        read = self._usual.read(frames, [FakeConnection()], 0, 1, SendReplies(), messages, 1000, 1000)
        assert read == len(messages)
        return messages.states[0].row if read else None

    def _learn(self, topic: str) -> bytes | None:
        self.learnt.append(topic)
        return self.destinations.learn(topic)


@pytest.fixture
def asked(broker: WiredBroker) -> Asked:
    return Asked(broker)


def store(broker: WiredBroker, queue_id: int, topic: str = "orders") -> int:
    """A message to a queue; the queue's row."""
    put(broker.store, topic=topic, queue_id=queue_id)
    state = broker.store.queues.get(topic, queue_id)
    assert state is not None
    return state.row


async def test_queues_are_known_as_soon_as_they_are_there(broker: WiredBroker, asked: Asked) -> None:
    assert asked(1) is None
    assert len(asked.destinations.table) == 0
    second = store(broker, 1)
    assert (asked(1), asked(0)) == (second, None)
    first = store(broker, 0)
    assert (asked(1), asked(0)) == (second, first)
    store(broker, 5)
    assert asked(5) is None  # not one of those that may be written to
    assert asked.destinations.learn("orders") == struct.pack("=3i", 2, first, second) + b"\x06orders"
    assert asked.learnt == ["orders"] * 4
    assert (asked(1), asked(0), len(asked.learnt)) == (second, first, 4)


async def test_changes_of_the_topic_are_seen(broker: WiredBroker, asked: Asked) -> None:
    rows = store(broker, 0), store(broker, 1)
    assert (asked(0), asked(1)) == rows
    broker.topics.put(TopicConfig("orders", write_queue_nums=1))
    assert (asked(0), asked(1)) == (rows[0], None)
    broker.topics.put(TopicConfig("orders", topic_filter_type="MULTI_TAG"))
    assert asked(0) is None
    broker.topics.put(TopicConfig("orders", write_queue_nums=2))
    assert (asked(0), asked(1)) == rows
    broker.topics.delete("orders")
    assert asked(0) is None
    broker.topics.replace_all(TopicConfigTable(topic_config_table={"orders": TopicConfig("orders")}))
    assert (asked(0), asked(1)) == rows
    broker.topics.replace_all(TopicConfigTable())
    assert asked(0) is None


async def test_queues_that_were_removed_are_gone(broker: WiredBroker, asked: Asked) -> None:
    rows = store(broker, 0), store(broker, 2)
    assert (asked(0), asked(1), asked(2)) == (rows[0], None, rows[1])
    broker.store.queues.remove_where(lambda topic, queue_id, end: queue_id == 2)
    assert (asked(0), asked(2)) == (rows[0], None)
    broker.store.remove_topic("orders")
    assert asked(0) is None


async def test_special_queues_are_left_out(broker: WiredBroker, asked: Asked) -> None:
    store(broker, 0, SCHEDULE_TOPIC)
    broker.topics.usual[SCHEDULE_TOPIC] = 4
    assert asked(0, SCHEDULE_TOPIC) is None


async def test_many_topics_come_and_go(broker: WiredBroker, asked: Asked) -> None:
    """More than the table has places for at first, and some are taken out of the middle."""
    names = [f"topic-{number}" for number in range(300)]
    rows: dict[str, int | None] = {}
    for name in names:
        broker.topics.put(TopicConfig(name, write_queue_nums=1))
        rows[name] = store(broker, 0, name)
    for removed in ([], names[::7], names[::3]):
        for name in removed:
            broker.topics.delete(name)
            rows[name] = None
        assert {name: asked(0, name) for name in names} == rows
        assert len(asked.destinations.table) == sum(row is not None for row in rows.values())
    asked.destinations.table.clear()
    assert len(asked.destinations.table) == 0
    assert {name: asked(0, name) for name in names} == rows
