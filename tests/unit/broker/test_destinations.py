"""Where plain sends may go is learnt when it is asked for, and forgotten when it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.broker.destinations import Destinations
from downrange.model.topics import SCHEDULE_TOPIC, TopicConfig
from downrange.protocol.bodies.topics import TopicConfigTable
from tests.support.compiled_cases import packed
from tests.unit.broker.wired import WiredBroker, wire
from tests.unit.store.small_store import new_message


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[WiredBroker]:
    made = wire(tmp_path)
    made.topics.put(TopicConfig("orders", write_queue_nums=3))
    yield made
    made.close()


@pytest.fixture
def destinations(broker: WiredBroker) -> Destinations:
    return Destinations(broker.topics, broker.store.queues)


def store(broker: WiredBroker, queue_id: int, topic: str = "orders") -> int:
    """A message to a queue; the queue's row."""
    broker.store.append(new_message(topic=topic, queue_id=queue_id))
    state = broker.store.queues.get(topic, queue_id)
    assert state is not None
    return state.row


def is_unknown(destinations: Destinations, topic: str = "orders") -> bool:
    with pytest.raises(KeyError):
        destinations[topic]
    return topic not in destinations


async def test_queues_are_known_as_soon_as_they_are_there(broker: WiredBroker, destinations: Destinations) -> None:
    assert is_unknown(destinations)
    second = store(broker, 1)
    assert destinations["orders"] == packed("orders", (-1, second))
    first = store(broker, 0)
    assert destinations["orders"] == packed("orders", (first, second))
    store(broker, 5)  # not one of those that may be written to
    assert destinations["orders"] == packed("orders", (first, second))
    assert list(destinations) == ["orders"]


async def test_changes_of_the_topic_are_seen(broker: WiredBroker, destinations: Destinations) -> None:
    rows = store(broker, 0), store(broker, 1)
    assert destinations["orders"] == packed("orders", rows)
    broker.topics.put(TopicConfig("orders", write_queue_nums=1))
    assert destinations["orders"] == packed("orders", rows[:1])
    broker.topics.put(TopicConfig("orders", topic_filter_type="MULTI_TAG"))
    assert is_unknown(destinations)
    broker.topics.put(TopicConfig("orders", write_queue_nums=2))
    assert destinations["orders"] == packed("orders", rows)
    broker.topics.delete("orders")
    assert is_unknown(destinations)
    broker.topics.replace_all(TopicConfigTable(topic_config_table={"orders": TopicConfig("orders")}))
    assert destinations["orders"] == packed("orders", rows)
    broker.topics.replace_all(TopicConfigTable())
    assert is_unknown(destinations)


async def test_queues_that_were_removed_are_gone(broker: WiredBroker, destinations: Destinations) -> None:
    rows = store(broker, 0), store(broker, 2)
    assert destinations["orders"] == packed("orders", (rows[0], -1, rows[1]))
    broker.store.queues.remove_where(lambda state: state.queue_id == 2)
    assert destinations["orders"] == packed("orders", rows[:1])
    broker.store.remove_topic("orders")
    assert is_unknown(destinations)


async def test_special_queues_are_left_out(broker: WiredBroker, destinations: Destinations) -> None:
    store(broker, 0, SCHEDULE_TOPIC)
    broker.topics.plain[SCHEDULE_TOPIC] = 4
    assert is_unknown(destinations, SCHEDULE_TOPIC)
