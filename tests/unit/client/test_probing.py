"""Probes of a broker that the routes have lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.producer.fault import QueueChooser, strategy
from downrange.client.producer.fault.attempt import Attempt, Outcome
from downrange.client.producer.probing import ROUTES_AT_ONCE, run_probes
from downrange.client.producer.publish_info import PublishInfo, publish_info
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import Message
from downrange.protocol.bodies.routes import TopicRouteData
from tests.unit.client.fake_cluster import FakeCluster
from tests.unit.client.scripted import (
    answer_sends,
    producer_of,
    route_of,
    scripted_namesrv,
    sends,
    stored,
    until,
)

NOBODY = "127.0.0.1:1"
MESSAGE = Message("orders", b"body")


def without(route: TopicRouteData, broker: str) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=tuple(data for data in route.broker_datas if data.broker_name != broker),
        queue_datas=tuple(data for data in route.queue_datas if data.broker_name != broker),
    )


async def test_a_broker_that_came_back_is_found_long_before_the_routes_are_refreshed(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    addresses = {name: broker.address for name, broker in cluster.brokers.items()}
    whole = route_of(addresses)
    clock = ManualClock()
    async with scripted_namesrv(**{**addresses, "broker-b": NOBODY}) as (namesrv, _):
        producer = producer_of(namesrv.address, config=ProducerConfig(fault_strategy="adaptive"), clock=clock)
        async with producer.session, producer:

            async def send_until(condition: Callable[[], object], seconds: float) -> None:
                """When a probe is due is partly luck, and it travels over real sockets."""
                for _ in range(round(seconds / 0.1)):
                    if condition():
                        return
                    await producer.send(MESSAGE)
                    await clock.advance(0.1)
                    await asyncio.sleep(0.01)
                assert condition()

            await producer.queues("orders")
            namesrv.routes["orders"] = without(whole, "broker-b")
            # The first message for broker-b fails there, and the route is looked up.
            await send_until(lambda: list(producer.routes._infos["orders"].addresses) == ["broker-a"], 4)
            namesrv.routes["orders"] = whole
            await send_until(lambda: len(sends(cluster.brokers["broker-b"])) > 3, 10)
            assert clock.monotonic() - ManualClock().monotonic() < producer.session.config.route_seconds / 2


async def test_a_probe_looks_up_a_few_routes_of_many() -> None:
    topics = [f"topic-{number}" for number in range(50)]
    route = route_of({"broker-a": NOBODY})
    infos: list[PublishInfo] = [publish_info(topic, route) for topic in topics]
    chooser = QueueChooser(strategy("adaptive"))
    clock = ManualClock()
    async with scripted_namesrv() as (namesrv, _):
        namesrv.routes.update(dict.fromkeys(topics, route))
        async with Session(ClientConfig((namesrv.address,)), clock=clock) as session:
            session.start()
            chooser.learn(clock.monotonic() * 1000, Attempt("broker-b", 1, Outcome.CONNECTION_LOST))
            probes = asyncio.create_task(run_probes(chooser, session, lambda: infos))
            await clock.advance(0.7)
            await until(lambda: len(namesrv.asked) >= ROUTES_AT_ONCE)
            probes.cancel()
            await asyncio.wait([probes])
            assert len(namesrv.asked) == ROUTES_AT_ONCE
