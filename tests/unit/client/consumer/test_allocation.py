from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.consumer.allocation import (
    AllocationStrategy,
    Averagely,
    AveragelyByCircle,
    ByConfig,
    ByMachineRoom,
    ConsistentHash,
    MachineRoomNearby,
    allocate,
    strategy_of,
)
from downrange.model.message import MessageQueue
from downrange.settings import ConfigError

CLIENTS = ["10.0.0.1@1", "10.0.0.2@1", "10.0.0.3@1"]
QUEUES = [MessageQueue("TopicTest", "broker-a", number) for number in range(8)]
ROOMS = [MessageQueue("TopicTest", name, number) for name in ("r1@b1", "r2@b2") for number in range(4)]


def shares(strategy: AllocationStrategy, queues: list[MessageQueue] = QUEUES) -> list[list[int]]:
    return [[queue.queue_id for queue in allocate(strategy, client, queues, CLIENTS)] for client in CLIENTS]


# --- what the genuine client computes for the same group


def test_averagely_as_java() -> None:
    assert shares(Averagely()) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_by_circle_as_java() -> None:
    assert shares(AveragelyByCircle()) == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_consistent_hash_as_java() -> None:
    assert shares(ConsistentHash()) == [[1, 4, 5], [0, 6, 7], [2, 3]]


def test_machine_room_as_java() -> None:
    strategy = ByMachineRoom(frozenset({"r1", "r2"}))
    found = [
        [(queue.broker_name, queue.queue_id) for queue in allocate(strategy, client, ROOMS, CLIENTS)]
        for client in CLIENTS
    ]
    assert found == [
        [("r1@b1", 0), ("r1@b1", 1), ("r2@b2", 2)],
        [("r1@b1", 2), ("r1@b1", 3), ("r2@b2", 3)],
        [("r2@b2", 0), ("r2@b2", 1)],
    ]


# --- the rules


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_with_fewer_queues_than_members_the_last_get_nothing(count: int) -> None:
    found = shares(Averagely(), QUEUES[:count])
    assert found == [[number] if number < count else [] for number in range(3)]


def test_a_member_the_broker_does_not_list_gets_nothing() -> None:
    near = MachineRoomNearby(Averagely(), lambda queue: "r", lambda client: "r")
    for strategy in (Averagely(), AveragelyByCircle(), ConsistentHash(), ByMachineRoom(frozenset({"r1"})), near):
        assert allocate(strategy, "10.0.0.9@1", QUEUES, CLIENTS) == []


def test_machine_room_leaves_other_rooms_alone() -> None:
    strategy = ByMachineRoom(frozenset({"r1"}))
    assert {queue.broker_name for client in CLIENTS for queue in allocate(strategy, client, ROOMS, CLIENTS)} == {
        "r1@b1"
    }
    assert allocate(strategy, CLIENTS[0], QUEUES, CLIENTS) == []  # broker names that tell no room


def test_configured_queues_are_held_whoever_is_there() -> None:
    strategy = ByConfig((QUEUES[5],))
    assert allocate(strategy, "anybody", QUEUES, CLIENTS) == [QUEUES[5]]


def test_nearby_keeps_to_the_own_room_and_shares_rooms_nobody_is_in() -> None:
    strategy = MachineRoomNearby(
        Averagely(),
        room_of_queue=lambda queue: queue.broker_name.partition("@")[0],
        room_of_client=lambda client: "r1" if client < "10.0.0.3" else "elsewhere",
    )
    assert strategy.name == "MACHINE_ROOM_NEARBY-AVG"
    found = [
        [(queue.broker_name, queue.queue_id) for queue in allocate(strategy, client, ROOMS, CLIENTS)]
        for client in CLIENTS
    ]
    assert found == [
        [("r1@b1", 0), ("r1@b1", 1), ("r2@b2", 0), ("r2@b2", 1)],
        [("r1@b1", 2), ("r1@b1", 3), ("r2@b2", 2)],
        [("r2@b2", 3)],
    ]


def test_strategies_by_name() -> None:
    assert strategy_of("AVG_BY_CIRCLE") == AveragelyByCircle()
    with pytest.raises(ConfigError, match="AVG, AVG_BY_CIRCLE, CONSISTENT_HASH"):
        strategy_of("RANDOM")


@given(
    strategy=st.sampled_from([Averagely(), AveragelyByCircle(), ConsistentHash(), ByMachineRoom(frozenset({"r1"}))]),
    queues=st.lists(
        st.builds(MessageQueue, st.just("t"), st.sampled_from(["r1@a", "r1@b"]), st.integers(0, 40)), unique=True
    ),
    clients=st.lists(st.text(min_size=1), min_size=1, max_size=8, unique=True),
    data=st.data(),
)
def test_every_queue_has_exactly_one_owner_whatever_the_order_of_the_facts(
    strategy: AllocationStrategy, queues: list[MessageQueue], clients: list[str], data: st.DataObject
) -> None:
    owners: dict[MessageQueue, int] = dict.fromkeys(queues, 0)
    for client in clients:
        shuffled = data.draw(st.permutations(queues))
        for queue in allocate(strategy, client, shuffled, data.draw(st.permutations(clients))):
            owners[queue] += 1
    assert set(owners.values()) <= {1}
