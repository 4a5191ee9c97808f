"""Sends without a task: they decide as `send` does, and leave nothing behind when given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.errors import SendFailed
from downrange.client.fault import StrategyName
from downrange.client.messages import BodyMissing
from downrange.client.producer import AsyncProducer
from downrange.client.send_result import SendResult
from downrange.model.message import Message, MessageQueue
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import LocalProtocolError
from downrange.protocol.framing import MAX_FRAME
from tests.unit.client.fake_cluster import TOPIC, Answering, FakeCluster, reply
from tests.unit.client.scripted import Silence, answer_sends, in_turn, sends, stored, stored_with, until

MESSAGE = Message(TOPIC, b"body")
BUSY = reply(ResponseCode.SYSTEM_BUSY, "busy")
ERROR = reply(ResponseCode.SYSTEM_ERROR, "broken")
REFUSED = reply(ResponseCode.MESSAGE_ILLEGAL, "no")
NOT_FLUSHED = stored_with(ResponseCode.FLUSH_DISK_TIMEOUT)


def unreadable(command: Command) -> Command:
    """Stored, says the code, but not where."""
    return command.reply(ext_fields={"queueId": "x"})


async def directly(producer: AsyncProducer, message: Message, queue: MessageQueue | None = None) -> SendResult:
    told: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
    producer.send_directly(message, told, queue=queue)
    return await told


async def ordinarily(producer: AsyncProducer, message: Message, queue: MessageQueue | None = None) -> SendResult:
    return await producer.send(message, queue=queue)


Sending = Callable[[AsyncProducer, Message, MessageQueue | None], Awaitable[SendResult]]


async def connect_to_all(producer: AsyncProducer) -> None:
    for queue in await producer.queues(TOPIC):
        await producer.send(MESSAGE, queue=queue)


async def story(
    cluster: FakeCluster, send: Sending, answers: tuple[Answering, ...], strategy: StrategyName, *, given: bool
) -> list[object]:
    """What became of some sends, where their attempts went, and what the producer learned."""
    for broker in cluster.brokers.values():
        broker.asked.clear()
    answer_sends(cluster, in_turn(*answers, stored))
    config = ProducerConfig(fault_strategy=strategy, retry_another_broker_when_not_store_ok=True)
    told: list[object] = []
    async with AsyncProducer("producers", cluster.namesrv, config, random_source=random.Random(7)) as producer:
        queue = (await producer.queues(TOPIC))[1] if given else None
        for _ in range(6):
            try:
                result = await send(producer, MESSAGE, queue)
                told.append((result.status, result.queue, result.queue_offset))
            except SendFailed as error:
                told.append([(attempt.queue, type(attempt.error), str(attempt.error)) for attempt in error.attempts])
        assert await producer.drain(0)
    told += [[(header.queue_id, header.topic) for header in sends(broker)] for broker in cluster.brokers.values()]
    return told


@pytest.mark.parametrize("strategy", ["round_robin", "adaptive"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "answers",
    [
        (),
        (stored, ERROR),
        (ERROR, stored, ERROR, ERROR, ERROR),
        (REFUSED, stored),
        (stored, BUSY, stored, BUSY),
        (NOT_FLUSHED, stored, NOT_FLUSHED, NOT_FLUSHED, NOT_FLUSHED),
        (stored, unreadable, stored),
    ],
)
async def test_a_direct_send_decides_as_any_send(
    cluster: FakeCluster, answers: tuple[Answering, ...], strategy: StrategyName, given: bool
) -> None:
    ordinary = await story(cluster, ordinarily, answers, strategy, given=given)
    direct = await story(cluster, directly, answers, strategy, given=given)
    assert direct == ordinary


@pytest.mark.parametrize("send", [ordinarily, directly])
async def test_a_message_too_large_for_a_frame_is_a_failed_send(cluster: FakeCluster, send: Sending) -> None:
    answer_sends(cluster, stored)
    config = ProducerConfig(max_message_size=2 * MAX_FRAME, compress_over_bytes=4 * MAX_FRAME)
    async with AsyncProducer("producers", cluster.namesrv, config) as producer:
        await connect_to_all(producer)
        with pytest.raises(SendFailed) as failed:
            await send(producer, Message(TOPIC, bytes(MAX_FRAME)), None)
        assert {type(attempt.error) for attempt in failed.value.attempts} == {LocalProtocolError}
        assert await producer.drain(0)


async def test_a_wrong_message_is_told_at_once_and_sends_nothing(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        with pytest.raises(BodyMissing):
            await directly(producer, Message(TOPIC, b""))
        assert await producer.drain(0)


async def test_a_direct_send_that_is_given_up_frees_its_place(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    silence = Silence()
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await connect_to_all(producer)
        answer_sends(cluster, silence)
        told: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        direct = producer.send_directly(MESSAGE, told)
        await until(lambda: silence.waiting)
        assert len(asked_of(producer)) == 1
        direct.cancel()
        assert asked_of(producer) == []
        assert not told.done()
        assert await producer.drain(0), "it is not on its way any more"
        silence.end()


async def test_a_cancelled_send_frees_its_place(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    silence = Silence()
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await connect_to_all(producer)
        answer_sends(cluster, silence)
        tasks = [asyncio.create_task(producer.send(MESSAGE)) for _ in range(20)]
        await until(lambda: len(silence.waiting) == 20)
        assert len(asked_of(producer)) == 20
        for task in tasks[:15]:
            task.cancel()
        await asyncio.wait(tasks[:15])
        assert len(asked_of(producer)) == 5
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert asked_of(producer) == []
        silence.end()


def asked_of(producer: AsyncProducer) -> list[int]:
    """The requests that wait for a reply, of all connections."""
    connections = [producer.session.connection(address) for address in producer.session.addresses_in_use()]
    return [opaque for connection in connections if connection for opaque in connection._asked.requests]
