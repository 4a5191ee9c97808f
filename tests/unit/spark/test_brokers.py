"""Which process of a broker a Spark read asks: the master, or a slave that stands in for it for a while."""

from __future__ import annotations

from typing import cast

import pytest

from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.routes import BrokerData, TopicRouteData
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.spark.brokers import STAND_IN_SECONDS, BrokerAway, Brokers
from downrange.transport.errors import ConnectFailed

MASTER, SLAVE = "127.0.0.1:1", "127.0.0.1:2"
QUEUE = MessageQueue("orders", "broker-a", 0)
ROUTE = TopicRouteData(
    broker_datas=(BrokerData(cluster="c", broker_name="broker-a", broker_addrs={0: MASTER, 1: SLAVE}),)
)


class FakeSession:
    """A master and a slave, each of which may be away."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.away: set[str] = set()
        self.asked: list[str] = []

    def known_route(self, topic: str) -> TopicRouteData:
        return ROUTE

    async def invoke(self, address: str, command: Command) -> Command:
        self.asked.append(address)
        if address in self.away:
            raise ConnectFailed(f"cannot connect to {address}")
        return command

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return asked


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def brokers(session: FakeSession) -> Brokers:
    return Brokers(cast(Session, session), group="readers")


async def is_told_by_slave(brokers: Brokers) -> bool:
    _, is_of_slave = await brokers.ask_any(QUEUE, request(RequestCode.GET_MAX_OFFSET))
    return is_of_slave


async def test_a_slave_stands_in_for_a_master_that_is_away(session: FakeSession, brokers: Brokers) -> None:
    assert not await is_told_by_slave(brokers)
    session.away.add(MASTER)
    assert await is_told_by_slave(brokers)
    assert await is_told_by_slave(brokers)
    assert session.taken() == [MASTER, MASTER, SLAVE, SLAVE]


async def test_a_master_that_is_back_is_asked_again(session: FakeSession, brokers: Brokers) -> None:
    """The slave may have stopped to follow it: whoever asks the slave for ever would never see a new message."""
    session.away.add(MASTER)
    await is_told_by_slave(brokers)
    session.away.clear()
    session.clock.tick(STAND_IN_SECONDS / 2)
    assert await is_told_by_slave(brokers)
    session.clock.tick(STAND_IN_SECONDS / 2)
    session.taken()
    assert not await is_told_by_slave(brokers)
    assert session.taken() == [MASTER]


async def test_a_master_that_stays_away_is_tried_now_and_then(session: FakeSession, brokers: Brokers) -> None:
    session.away.add(MASTER)
    for _ in range(4):
        assert await is_told_by_slave(brokers)
        assert await is_told_by_slave(brokers)
        session.clock.tick(STAND_IN_SECONDS)
    assert session.taken() == [MASTER, SLAVE, SLAVE] * 4


async def test_nobody_answers(session: FakeSession, brokers: Brokers) -> None:
    session.away.update((MASTER, SLAVE))
    with pytest.raises(BrokerAway, match="broker broker-a of topic orders does not answer"):
        await is_told_by_slave(brokers)
