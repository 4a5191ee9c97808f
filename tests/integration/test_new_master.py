"""A broker has a new master: clients find it at the first error, not with the next look at the route 30 s later.

A broker that is killed and started again on another port, with its store directory, stands for the new master.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import SendFailed
from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.producer import AsyncProducer
from downrange.model.message import Message
from tests.support.lasting_port import lasting_port
from tests.support.process_cluster import ProcessCluster, process_cluster

PATIENT = ProducerConfig(send_timeout_seconds=25.0)
"""The time-out is for a busy machine, on which a broker starts slowly; the next look at the route is later still."""
FAILOVERS = 2


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ProcessCluster]:
    async with process_cluster(tmp_path, brokers=1, namesrvs=1) as running:
        yield running


async def fail_over(cluster: ProcessCluster) -> None:
    """The master dies; a moment later there is another one, elsewhere."""
    (broker,) = cluster.brokers
    await broker.kill()
    broker.port = lasting_port()
    await broker.start()


async def until(condition: Callable[[], object], seconds: float = 25) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def send_through_failovers(cluster: ProcessCluster, send: Callable[[int], Awaitable[object]]) -> int:
    """Send numbers one after the other while the master changes; how many were sent. No send may fail."""
    sent = 0
    is_over = False

    async def keep_sending() -> None:
        nonlocal sent
        while not is_over:
            await send(sent)
            sent += 1
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keep_sending())
        for _ in range(FAILOVERS):
            before = sent
            await until(lambda before=before: sent > before + 20)  # type: ignore[misc]
            await fail_over(cluster)
            before = sent
            await until(lambda before=before: sent > before + 20)  # type: ignore[misc]
        is_over = True
    return sent


@pytest.mark.parametrize("sharding_key", ["", "customer-7"])
async def test_no_send_fails_while_the_master_changes(cluster: ProcessCluster, sharding_key: str) -> None:
    async with AsyncProducer("producers", cluster.namesrv, PATIENT) as producer:

        async def send(number: int) -> object:
            return await producer.send(Message("orders", str(number).encode(), sharding_key=sharding_key or None))

        assert await send_through_failovers(cluster, send) > 20 * FAILOVERS


async def test_no_async_or_batch_send_fails_while_the_master_changes(cluster: ProcessCluster) -> None:
    async with AsyncProducer("producers", cluster.namesrv, PATIENT) as producer:

        async def send(number: int) -> object:
            message = Message("orders", str(number).encode())
            return await producer.send_async(message) if number % 2 else await producer.send_batch([message, message])

        assert await send_through_failovers(cluster, send) > 20 * FAILOVERS


async def test_no_blocking_send_fails_while_the_master_changes(cluster: ProcessCluster) -> None:
    with Producer("producers", cluster.namesrv, PATIENT) as producer:

        async def send(number: int) -> object:
            return await asyncio.to_thread(producer.send, Message("orders", str(number).encode()))

        assert await send_through_failovers(cluster, send) > 20 * FAILOVERS


async def test_rocketmqs_strategies_fail_at_once_as_ever(cluster: ProcessCluster) -> None:
    config = ProducerConfig(fault_strategy="round_robin", send_timeout_seconds=25.0)
    async with AsyncProducer("producers", cluster.namesrv, config) as producer:
        await producer.send(Message("orders", b"0"))
        await cluster.brokers[0].kill()
        begun = time.monotonic()
        with pytest.raises(SendFailed, match="3 attempts"):
            await producer.send(Message("orders", b"1"))
        assert time.monotonic() - begun < 20


class Seen:
    """A callback that notes the numbers it gets, queue by queue."""

    def __init__(self) -> None:
        self.by_queue: dict[int, list[int]] = {}

    async def __call__(self, message: ReceivedMessage) -> None:
        self.by_queue.setdefault(message.queue_id, []).append(int(message.body))

    @property
    def numbers(self) -> set[int]:
        return {number for numbers in self.by_queue.values() for number in numbers}


@pytest.mark.parametrize("orderly", [False, True])
async def test_push_consumers_go_on_at_the_new_master_and_miss_nothing(cluster: ProcessCluster, orderly: bool) -> None:
    seen = Seen()
    async with AsyncProducer("producers", cluster.namesrv, PATIENT) as producer:

        async def send(number: int) -> object:
            return await producer.send(Message("orders", str(number).encode()))

        await send(0)
        config = ConsumerConfig(orderly=orderly)
        async with AsyncPushConsumer("billing", cluster.namesrv, config, on_message=seen) as consumer:
            await consumer.subscribe("orders")
            await until(lambda: seen.numbers)
            sent = await send_through_failovers(cluster, send)
            await until(lambda: seen.numbers >= set(range(sent)))
    if orderly:
        for numbers in seen.by_queue.values():
            # A message whose lock was lost under it may come again, but never one behind its successor's first time.
            firsts = list(dict.fromkeys(numbers))
            assert firsts == sorted(firsts)


async def test_an_orderly_queue_is_locked_at_the_new_master_before_it_is_consumed(cluster: ProcessCluster) -> None:
    seen = Seen()
    async with (
        AsyncProducer("producers", cluster.namesrv, PATIENT) as producer,
        AsyncPushConsumer("billing", cluster.namesrv, ConsumerConfig(orderly=True), on_message=seen) as consumer,
    ):
        await producer.send(Message("orders", b"0"))
        await consumer.subscribe("orders")
        await until(lambda: seen.numbers == {0})
        old = cluster.brokers[0].address
        await cluster.brokers[0].kill()
        # A pull fails: there may be a new master, to which the lock means nothing.
        await until(lambda: all(queue.locked_until is None for queue in consumer._held))
        assert {queue.locked_by for queue in consumer._held} == {old}
        cluster.brokers[0].port = lasting_port()
        await cluster.brokers[0].start()
        await producer.send(Message("orders", b"1"))
        await until(lambda: seen.numbers == {0, 1})
        address = cluster.brokers[0].address
        await until(lambda: all(queue.locked_by == address for queue in consumer._held))


async def test_lite_pull_consumers_go_on_at_the_new_master_and_miss_nothing(cluster: ProcessCluster) -> None:
    seen = Seen()
    async with AsyncProducer("producers", cluster.namesrv, PATIENT) as producer:

        async def send(number: int) -> object:
            return await producer.send(Message("orders", str(number).encode()))

        await send(0)
        async with AsyncLitePullConsumer("readers", cluster.namesrv) as consumer:
            await consumer.subscribe("orders")

            async def keep_polling() -> None:
                while True:
                    for message in await consumer.poll(0.2):
                        await seen(message)

            polling = asyncio.create_task(keep_polling())
            await until(lambda: consumer.assignment)
            sent = await send_through_failovers(cluster, send)
            await until(lambda: seen.numbers >= set(range(1, sent)))
            polling.cancel()
