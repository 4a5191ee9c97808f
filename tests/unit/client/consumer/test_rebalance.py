from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.allocation import Averagely
from downrange.client.consumer.rebalance import (
    Changes,
    RebalanceTimer,
    allotted,
    changes,
    pause_seconds,
    readable_queues,
)
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.groups import ConsumerIds
from downrange.protocol.bodies.routes import QueueData, TopicRouteData
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeCluster, reply
from tests.unit.client.scripted import until

A, B, C = (MessageQueue(TOPIC, "broker-a", number) for number in range(3))


def test_readable_queues_are_sorted_as_every_member_sorts_them() -> None:
    route = TopicRouteData(
        queue_datas=(
            QueueData(broker_name="b", read_queue_nums=11, write_queue_nums=1, perm=6),
            QueueData(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=4),
            QueueData(broker_name="c", read_queue_nums=1, write_queue_nums=1, perm=2),
        )
    )
    found = readable_queues("t", route)
    assert [(queue.broker_name, queue.queue_id) for queue in found] == [("a", 0), *(("b", n) for n in range(11))]


def test_changes() -> None:
    assert changes([A, B], [C, B]) == Changes(removed=(A,), added=(C,))
    assert not changes([A], [A])


def test_rounds_come_sooner_while_something_is_missing() -> None:
    assert [pause_seconds(failures, 20) for failures in range(7)] == [20, 1, 2, 4, 8, 16, 20]


async def test_rounds_come_with_time_and_at_once_when_told() -> None:
    clock = ManualClock()
    rounds: list[float] = []

    async def rebalance() -> bool:
        rounds.append(clock.monotonic())
        return True

    timer = RebalanceTimer(rebalance, clock)
    start = clock.monotonic()
    task = asyncio.create_task(timer.run())
    await until(lambda: len(rounds) == 1)
    await clock.advance(19.5)
    assert len(rounds) == 1
    timer.soon()
    await until(lambda: len(rounds) == 2)
    await asyncio.sleep(0)
    await clock.advance(20)
    await until(lambda: len(rounds) == 3)
    assert [moment - start for moment in rounds] == [0, 19.5, 39.5]
    task.cancel()


async def test_a_round_that_fails_in_an_unforeseen_way_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    rounds = 0

    async def rebalance() -> bool:
        nonlocal rounds
        rounds += 1
        raise ZeroDivisionError

    task = asyncio.create_task(RebalanceTimer(rebalance, clock).run())
    await until(lambda: rounds == 1)
    await asyncio.sleep(0)
    await clock.advance(1)
    await until(lambda: rounds == 2)
    assert "rebalance failed" in caplog.text
    task.cancel()


# --- asking


@pytest.fixture
async def session(cluster: FakeCluster) -> AsyncIterator[Session]:
    async with Session(ClientConfig((cluster.namesrv,))) as session:
        for broker in cluster.brokers.values():
            broker.answers[RequestCode.HEART_BEAT] = reply()
        yield session


def list_members(cluster: FakeCluster, *members: str) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = reply(body=ConsumerIds(members))


async def test_my_share(cluster: FakeCluster, session: Session) -> None:
    list_members(cluster, session.client_id, "0-first")
    found = await allotted(session, GROUP, TOPIC, Averagely())
    assert [(queue.broker_name, queue.queue_id) for queue in found] == [("broker-b", 0), ("broker-b", 1)]


async def test_a_broker_that_does_not_know_us_yet_is_told_and_asked_again(
    cluster: FakeCluster, session: Session
) -> None:
    list_members(cluster, "somebody")
    session.heartbeats.add_producer("so that there is something to say")
    await session.follow(TOPIC)
    assert await allotted(session, GROUP, TOPIC, Averagely()) == []
    asked = [command.code for broker in cluster.brokers.values() for command in broker.asked]
    assert asked.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) == 2
    assert asked.count(RequestCode.HEART_BEAT) == 2  # both brokers


async def test_nothing_is_said_when_the_members_cannot_be_told(cluster: FakeCluster, session: Session) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = reply(ResponseCode.SYSTEM_ERROR, "no consumer")
    with pytest.raises(MQError):
        await allotted(session, GROUP, TOPIC, Averagely())
    with pytest.raises(MQError):
        await allotted(session, GROUP, "no-such-topic", Averagely())
