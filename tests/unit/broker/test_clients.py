from __future__ import annotations

from downrange.broker.clients import CLIENT_EXPIRES_MILLIS, Client, ConsumerGroup, Consumers, Producers
from downrange.model.subscription import Subscription, subscribe
from downrange.transport.connection import Connection
from tests.unit.broker.wired import FakeConnection

NOW = 1_700_000_000_000


class Watched:
    """Consumers, and the groups they said had changed."""

    def __init__(self) -> None:
        self.consumers = Consumers()
        self.changed: list[str] = []
        self.consumers.on_change = lambda group: self.changed.append(group.name)

    def join(self, connection: Connection, *subscriptions: Subscription, group: str = "g", heard: int = NOW) -> bool:
        return self.consumers.heartbeat(
            group,
            Client(connection, f"client-{connection.peer}", 0, 409, heard),
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
            subscriptions=subscriptions,
        )

    def group(self) -> ConsumerGroup:
        group = self.consumers.get("g")
        assert group is not None
        return group


async def test_a_new_member_changes_its_group_and_a_known_one_does_not() -> None:
    watched = Watched()
    one, two = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    orders = subscribe("orders", "*", version=1)
    assert watched.join(one, orders)
    assert not watched.join(one, orders)
    assert watched.join(two, orders)
    assert watched.changed == ["g", "g"]
    assert [client.client_id for client in watched.group().members.values()] == [
        "client-10.0.0.9:1",
        "client-10.0.0.9:2",
    ]
    found = watched.group().find("client-10.0.0.9:2")
    assert found is not None
    assert found.connection is two
    assert watched.group().find("nobody") is None


async def test_topics_that_come_or_go_are_a_change() -> None:
    watched = Watched()
    connection = FakeConnection()
    watched.join(connection, subscribe("a", "*"))
    assert watched.join(connection, subscribe("a", "*"), subscribe("b", "*"))
    assert watched.consumers.groups_of("b") == {"g"}
    assert watched.join(connection, subscribe("b", "*"))
    assert watched.consumers.subscription("g", "a") is None
    assert watched.consumers.groups_of("a") == set()


async def test_a_newer_subscription_replaces_the_old_one_silently() -> None:
    watched = Watched()
    connection = FakeConnection()
    first, older, newer = (subscribe("a", tags, version=n) for tags, n in (("x", 5), ("y", 4), ("z", 6)))
    watched.join(connection, first)
    assert not watched.join(connection, older)
    assert watched.consumers.subscription("g", "a") == first
    assert not watched.join(connection, newer)
    assert watched.consumers.subscription("g", "a") == newer
    assert watched.consumers.subscription("unknown", "a") is None
    assert watched.changed == ["g"]


async def test_the_last_heartbeat_says_how_the_group_consumes() -> None:
    watched = Watched()
    connection = FakeConnection()
    watched.join(connection)
    watched.consumers.heartbeat(
        "g",
        Client(connection, "c", 0, 409, NOW),
        consume_type="CONSUME_ACTIVELY",
        message_model="BROADCASTING",
        consume_from_where="CONSUME_FROM_TIMESTAMP",
        subscriptions=[],
    )
    group = watched.group()
    assert (group.consume_type, group.consume_from_where) == ("CONSUME_ACTIVELY", "CONSUME_FROM_TIMESTAMP")
    assert group.is_broadcasting


async def test_the_rest_of_the_group_hears_of_a_member_that_left() -> None:
    watched = Watched()
    one, two = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    watched.join(one)
    watched.join(two)
    watched.changed.clear()
    watched.consumers.leave("g", FakeConnection())
    watched.consumers.leave("unknown", one)
    assert watched.changed == []
    watched.consumers.leave("g", one)
    assert watched.changed == ["g"]
    watched.consumers.leave("g", two)
    assert watched.changed == ["g"]
    assert watched.consumers.get("g") is None
    assert len(watched.consumers) == 0


async def test_a_closed_connection_leaves_all_its_groups() -> None:
    watched = Watched()
    connection = FakeConnection()
    watched.join(connection, group="g")
    watched.join(connection, group="h")
    watched.consumers.drop(connection)
    assert list(watched.consumers) == []


async def test_a_silent_member_is_forgotten_after_two_minutes() -> None:
    watched = Watched()
    silent, alive = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    watched.join(silent)
    watched.join(alive, heard=NOW + 1)
    assert watched.consumers.expire(NOW + CLIENT_EXPIRES_MILLIS) == []
    watched.changed.clear()
    assert watched.consumers.expire(NOW + CLIENT_EXPIRES_MILLIS + 1) == [silent]
    assert list(watched.group().members) == [alive]
    assert watched.changed == ["g"]


async def test_producers_come_and_go() -> None:
    producers = Producers()
    one, two = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    producers.heartbeat("p", Client(one, "one", 0, 409, NOW))
    producers.heartbeat("p", Client(two, "two", 0, 409, NOW + 1))
    producers.heartbeat("q", Client(two, "two", 0, 409, NOW + 1))
    assert [(group, [client.client_id for client in members]) for group, members in producers] == [
        ("p", ["one", "two"]),
        ("q", ["two"]),
    ]
    found = producers.find("two")
    assert found is not None
    assert found.connection is two
    assert producers.find("three") is None
    assert producers.expire(NOW + CLIENT_EXPIRES_MILLIS + 1) == [one]
    producers.leave("p", one)
    producers.leave("unknown", two)
    producers.drop(two)
    assert producers.get("p") is None
    assert list(producers) == []


async def test_a_producer_to_ask_back_is_picked_in_turns_among_the_open_ones() -> None:
    producers = Producers()
    connections = [FakeConnection(f"10.0.0.9:{port}") for port in (1, 2, 3)]
    for connection in connections:
        producers.heartbeat("p", Client(connection, connection.peer, 0, 409, NOW))
    connections[1].is_up = False
    picked = [producers.pick("p", "t") for _ in range(4)]
    assert {client.client_id for client in picked if client} == {"10.0.0.9:1", "10.0.0.9:3"}
    assert None not in picked
    assert picked[0] is not picked[1]
    for connection in connections:
        connection.is_up = False
    assert producers.pick("p", "t") is None
    assert producers.pick("unknown", "t") is None
