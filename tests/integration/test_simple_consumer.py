"""Simple consumers against whole brokers: leases, acknowledgements, redelivery, filters, several brokers, errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from downrange import AsyncSimpleConsumer, PoppedMessage, Producer, SimpleConsumer, SimpleConsumerConfig
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.errors import AckFailed, ClientClosed, SubscriptionConflict
from downrange.client.producer.producer import AsyncProducer
from downrange.client.session import Session
from downrange.clock import SystemClock
from downrange.model.message import Message
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.groups import ConsumeFromWhere
from downrange.protocol.errors import BrokerError, SubscriptionParseFailed
from downrange.settings import ConfigError
from downrange.testing import broker as embedded_broker
from tests.support.broker_client import standalone
from tests.support.two_brokers import two_brokers

FIRST = SimpleConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


def address_of(running: RunningBroker) -> str:
    return str(running.config.broker.namesrv_addr)


@asynccontextmanager
async def consumers(
    root: Path, *, topic: str = "orders", queues: int = 4, **options: Any
) -> AsyncIterator[tuple[AsyncSimpleConsumer, AsyncProducer, RunningBroker]]:
    async with standalone(root, **options) as running:
        await create(address_of(running), topic, queues)
        async with (
            AsyncProducer("producers", address_of(running)) as producer,
            AsyncSimpleConsumer("readers", address_of(running), FIRST) as consumer,
        ):
            yield consumer, producer, running


async def create(namesrv: str, topic: str, queues: int) -> None:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        await admin.topics.create(TopicConfig(topic, queues, queues))
        await until_true(lambda: _is_known(admin, topic))


async def _is_known(admin: Admin, topic: str) -> bool:
    return topic in await admin.topics.names()


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


async def send(producer: AsyncProducer, count: int, topic: str = "orders", **options: Any) -> None:
    for number in range(count):
        await producer.send(Message(topic, b"%d" % number, **options))


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def test_messages_are_received_once_and_acknowledged(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, producer, running):
        await send(producer, 50, tags="T", keys="k")
        await consumer.subscribe("orders")
        seen: list[PoppedMessage] = []
        while len(seen) < 50:
            found = await consumer.receive(20, 30, 5)
            assert 0 < len(found) <= 20
            seen += found
            await consumer.ack_many(found)
        assert sorted(int(message.body) for message in seen) == list(range(50))
        first = seen[0]
        assert (first.topic, first.tags, first.keys, first.delivery_attempt) == ("orders", "T", ["k"], 1)
        assert first.properties["POP_CK"] == str(first.receipt_handle)
        assert await consumer.receive(20, 30, 0) == []
        assert len(running.pop.state.leases) == 0


async def test_more_messages_than_a_broker_gives_at_once(tmp_path: Path) -> None:
    async with consumers(tmp_path, queues=1) as (consumer, producer, _):
        await send(producer, 100)
        await consumer.subscribe("orders")
        assert len(await consumer.receive(80, timedelta(seconds=30), timedelta(seconds=5))) == 80
        assert len(await consumer.receive(80, 30, 5)) == 20


async def test_a_message_comes_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    for version_2 in (False, True):
        options = {"enable_retry_topic_v2": version_2}
        async with consumers(tmp_path / str(version_2), broker_options=options) as (consumer, producer, _):
            await send(producer, 1)
            await consumer.subscribe("orders")
            (first,) = await consumer.receive(4, 0.3, 5)
            (again,) = await consumer.receive(4, 0.3, 20)
            assert (again.delivery_attempt, again.topic, again.message_id) == (2, "orders", first.message_id)
            assert again.queue.topic == ("%RETRY%readers+orders" if version_2 else "%RETRY%readers_orders")
            (third,) = await consumer.receive(4, 30, 20)
            assert third.delivery_attempt == 3
            await consumer.ack(again)  # too late: answered, without effect
            await consumer.change_invisible_duration(third, 0)
            (fourth,) = await consumer.receive(4, 30, 20)
            assert fourth.delivery_attempt == 4
            await consumer.ack(fourth)
            assert await consumer.receive(4, 30, 0.5) == []


async def test_a_changed_message_is_acknowledged_by_its_new_handle(tmp_path: Path) -> None:
    async with consumers(tmp_path, queues=1) as (consumer, producer, running):
        await send(producer, 3)
        await consumer.subscribe("orders")
        found = await consumer.receive(3, 30, 5)
        old = str(found[2].receipt_handle)
        for message in found:  # the second and the third lie behind the start of their pop
            await consumer.change_invisible_duration(message, 60)
        assert str(found[2].receipt_handle) != old
        await consumer.ack(found[0])
        await consumer.ack_many(found[1:])
        assert len(running.pop.state.leases) == 0


async def test_filters(tmp_path: Path) -> None:
    options = {"enable_property_filter": True}
    async with consumers(tmp_path, broker_options=options) as (consumer, producer, running):
        await send(producer, 2, tags="A")
        await send(producer, 2, tags="B", properties={"n": "7"})
        await consumer.subscribe("orders", "A || C")
        assert [message.tags for message in await consumer.receive(8, 30, 5)] == ["A", "A"]
        async with AsyncSimpleConsumer("others", address_of(running), FIRST) as other:
            await other.subscribe("orders", sql="n > 5")
            assert [message.tags for message in await other.receive(8, 30, 5)] == ["B", "B"]
            with pytest.raises(SubscriptionParseFailed):
                await other.subscribe("orders", sql="n >")


async def test_a_receive_waits_and_is_woken(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, producer, running):
        await consumer.subscribe("orders")
        begun = time.monotonic()
        assert await consumer.receive(1, 30, 0.3) == []
        assert time.monotonic() - begun >= 0.3
        waiting = asyncio.create_task(consumer.receive(1, 30, 30))
        await until(lambda: len(running.pop.state.waiting))
        await send(producer, 1)
        (message,) = await waiting
        assert message.body == b"0"
        assert time.monotonic() - begun < 15


async def test_a_cancelled_receive_keeps_nothing(tmp_path: Path) -> None:
    async with consumers(tmp_path, queues=1) as (consumer, producer, _):
        await consumer.subscribe("orders")
        await send(producer, 40)
        cancelled = 0
        for _ in range(20):
            task = asyncio.create_task(consumer.receive(1, 600, 5))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cancelled += task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert cancelled
        seen: set[bytes] = set()
        async with asyncio.timeout(20):
            while len(seen) < 40:
                found = await consumer.receive(32, 600, 5)
                seen |= {message.body for message in found}
                await consumer.ack_many(found)


async def test_two_brokers_and_two_topics(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as cluster:
        for topic in ("orders", "bills"):
            await create(cluster.namesrv, topic, 2)
        async with (
            AsyncProducer("producers", cluster.namesrv) as producer,
            AsyncSimpleConsumer("readers", cluster.namesrv, FIRST) as consumer,
        ):
            await consumer.subscribe("orders")
            await consumer.subscribe("bills")
            for topic in ("orders", "bills"):
                for queue in await producer.queues(topic):
                    await producer.send(Message(topic, b"x"), queue=queue)
            found = await consumer.receive(32, 30, 5)
            assert len({message.queue for message in found}) == 8
            await consumer.ack_many(found)
            assert len(cluster.a.pop.state.leases) + len(cluster.b.pop.state.leases) == 0
            # Whichever broker has the next message: who waits asks all of them.
            for name in ("broker-a", "broker-b"):
                queue = next(queue for queue in await producer.queues("bills") if queue.broker_name == name)
                waiting = asyncio.create_task(consumer.receive(8, 30, 30))
                await until(lambda: len(cluster.a.pop.state.waiting) == len(cluster.b.pop.state.waiting) == 2)
                await producer.send(Message("bills", b"y"), queue=queue)
                (message,) = await asyncio.wait_for(waiting, 20)  # not only when the wait of 30 s ends
                await consumer.ack(message)


async def test_a_topic_that_appears_later(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, producer, _):
        await consumer.subscribe("later")
        with pytest.raises(Exception, match="no broker serves the topic later"):
            await consumer.receive(1, 30, 0)
        waiting = asyncio.create_task(consumer.receive(1, 30, 60))
        await send(producer, 1, "later")
        assert [message.body for message in await waiting] == [b"0"]


async def test_dead_letters(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, producer, running):
        await send(producer, 1)
        await consumer.subscribe("orders")
        (message,) = await consumer.receive(1, 30, 5)
        await consumer.forward_to_dead_letter_queue(message)
        assert len(running.pop.state.leases) == 0
        assert running.pop.state.store.max_offset_of("%DLQ%readers", 0) == 1


async def test_wrong_use(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, producer, running):
        with pytest.raises(SubscriptionConflict, match="subscribe to a topic first"):
            await consumer.receive(1, 30)
        await consumer.subscribe("orders")
        number: Any
        for number in (0, -1, True, 1.5):
            with pytest.raises(ConfigError, match="max_message_num"):
                await consumer.receive(number, 30)
        duration: Any
        for duration in (-1, "30", None):
            with pytest.raises(ConfigError, match="invisible_duration"):
                await consumer.receive(1, duration)
        with pytest.raises(ConfigError, match="invisible_duration is 0"):
            await consumer.receive(1, 0)
        with pytest.raises(ClientClosed, match="started before"):
            await consumer.start()
        await send(producer, 2)
        found = await consumer.receive(2, 30, 5)
        running.topics.delete("orders")
        with pytest.raises(BrokerError):
            await consumer.ack(found[0])
        await consumer.close()
        with pytest.raises(ClientClosed, match="is closed"):
            await consumer.ack(found[0])
    with pytest.raises(ConfigError, match="TIMESTAMP"):
        SimpleConsumerConfig(consume_from_where=ConsumeFromWhere.TIMESTAMP)
    with pytest.raises(ConfigError, match="await_duration"):
        SimpleConsumerConfig(await_duration=-1)


async def test_a_broker_that_is_away(tmp_path: Path) -> None:
    """Nothing is acknowledged that was not, and the error says so."""
    async with standalone(tmp_path) as running:
        namesrv = address_of(running)
        await create(namesrv, "orders", 1)
        config = SimpleConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, retry_seconds=0.2)
        consumer = await AsyncSimpleConsumer("readers", namesrv, config).start()
        await consumer.subscribe("orders")
        async with AsyncProducer("producers", namesrv) as producer:
            await send(producer, 3)
        found = await consumer.receive(3, 30, 5)
    try:
        with pytest.raises(AckFailed, match="3 of 3 messages were not acknowledged") as failure:
            await consumer.ack_many(found)
        assert set(failure.value.failed) == set(found)
        assert failure.value.retriable
        with pytest.raises(Exception, match="127"):
            await consumer.receive(1, 30, 0.2)
    finally:
        await consumer.close()


class WrongClock(SystemClock):
    """A clock that is wrong by some seconds."""

    def __init__(self, seconds: float) -> None:
        self._millis = int(seconds * 1000)

    def now(self) -> int:
        return super().now() + self._millis


@pytest.mark.parametrize("seconds", [-60, 60])
async def test_clocks_may_differ(tmp_path: Path, seconds: float) -> None:
    async with consumers(tmp_path) as (_, producer, running):
        session = Session(ClientConfig.of(address_of(running)), clock=WrongClock(seconds))
        async with session, AsyncSimpleConsumer("others", config=FIRST, session=session) as consumer:
            await consumer.subscribe("orders")
            await send(producer, 3)
            found = await consumer.receive(3, 30, 10)
            await consumer.change_invisible_duration(found[0], 30)
            await consumer.ack_many(found)
            assert len(running.pop.state.leases) == 0
            waiting = asyncio.create_task(consumer.receive(3, 30, 20))
            await send(producer, 1)
            assert len(await waiting) == 1


async def test_operators_see_the_consumer(tmp_path: Path) -> None:
    async with consumers(tmp_path) as (consumer, _, running):
        await consumer.subscribe("orders")
        async with Admin(ClientConfig.of(address_of(running))) as admin:
            (found,) = (await admin.groups.connections("readers")).done.values()
            assert found is not None
            assert [one.client_id for one in found.connection_set] == [consumer.session.client_id]


def test_blocking() -> None:
    with embedded_broker() as running:
        with Producer("producers", running.namesrv) as producer:
            for number in range(10):
                producer.send(Message("orders", b"%d" % number))
        with SimpleConsumer("readers", running.namesrv, FIRST) as consumer:
            consumer.subscribe("orders")
            seen: list[PoppedMessage] = []
            while len(seen) < 10:
                found = consumer.receive(4, 30, 5)
                consumer.change_invisible_duration(found[0], 60)
                consumer.ack(found[0])
                consumer.ack_many(found[1:])
                seen += found
            assert sorted(int(message.body) for message in seen) == list(range(10))
            assert consumer.receive(4, 30, 0) == []
            consumer.unsubscribe("orders")
            assert consumer.subscriptions == ()
        with pytest.raises(ClientClosed, match="is closed"):
            consumer.receive(1, 30)
