"""All ways to make the first attempt: they decide alike, and leave nothing behind when given up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import ClientClosed, SendFailed
from downrange.client.producer.blocking.direct_sends import DirectSends
from downrange.client.producer.fault import StrategyName
from downrange.client.producer.outgoing import BodyMissing
from downrange.client.producer.pending_send import PendingSend
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.started_send import StartedSend
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import LocalProtocolError, SystemBusy
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


async def ordinarily(producer: AsyncProducer, message: Message, queue: MessageQueue | None = None) -> SendResult:
    return await producer.send(message, queue=queue)


async def without_shortcut(producer: AsyncProducer, message: Message, queue: MessageQueue | None) -> SendResult:
    return (await producer.delivery.deliver(producer.ready(message), SendKind.SYNC, queue, None, None))[0]


async def for_a_thread(producer: AsyncProducer, message: Message, queue: MessageQueue | None) -> SendResult:
    """On the loop, without a task."""
    aim = producer.delivery.aim(message, queue, None, None)
    if aim is None:
        return await producer.send(message, queue=queue)
    started = StartedSend(*aim)
    return await pending_send(producer, started)[1]


async def on_its_own_socket(producer: AsyncProducer, message: Message, queue: MessageQueue | None) -> SendResult:
    """On another thread, with a connection made for this send."""
    aim = producer.delivery.aim(message, queue, None, None)
    if aim is None:
        return await producer.send(message, queue=queue)
    started = StartedSend(*aim)
    loop = asyncio.get_running_loop()
    direct = DirectSends(producer.session, producer.delivery)

    async def go_on() -> SendResult:
        return await pending_send(producer, started)[1]

    try:
        return await asyncio.to_thread(
            direct.send, started, lambda: asyncio.run_coroutine_threadsafe(go_on(), loop).result()
        )
    finally:
        direct.close()


def pending_send(producer: AsyncProducer, started: StartedSend) -> tuple[PendingSend, asyncio.Future[SendResult]]:
    told: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()

    def ended(_: PendingSend, result: SendResult | BaseException) -> None:
        if isinstance(result, SendResult):
            told.set_result(result)
        else:
            told.set_exception(result)

    send = PendingSend(producer, ended)
    send.go_on(started)
    return send, told


async def among_many(producer: AsyncProducer, message: Message, queue: MessageQueue | None) -> SendResult:
    if queue is not None:
        return await producer.send(message, queue=queue)
    (sent,) = await producer.send_all([message])
    if isinstance(sent, MQError):
        raise sent
    return sent


Sending = Callable[[AsyncProducer, Message, MessageQueue | None], Awaitable[SendResult]]
WAYS: tuple[Sending, ...] = (ordinarily, for_a_thread, on_its_own_socket, among_many)


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
    # On a clock that stands still no broker is slower than another, however busy the machine is.
    async with (
        Session(ClientConfig.of(cluster.namesrv), clock=ManualClock()) as session,
        AsyncProducer("producers", config=config, session=session, random_source=random.Random(7)) as producer,
    ):
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
async def test_every_way_decides_alike(
    cluster: FakeCluster, answers: tuple[Answering, ...], strategy: StrategyName, given: bool
) -> None:
    plain = await story(cluster, without_shortcut, answers, strategy, given=given)
    for way in WAYS:
        assert await story(cluster, way, answers, strategy, given=given) == plain, way.__name__


async def in_the_background(producer: AsyncProducer, message: Message, queue: MessageQueue | None) -> SendResult:
    return await producer.send_async(message, queue=queue)


async def in_the_background_without_shortcut(
    producer: AsyncProducer, message: Message, queue: MessageQueue | None
) -> SendResult:
    return (await producer.delivery.deliver(producer.ready(message), SendKind.ASYNC, queue, None, None))[0]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "answers",
    [
        (),
        (stored, ERROR),
        (REFUSED, stored),
        (stored, BUSY, stored),
        (stored, NOT_FLUSHED),
        (stored, unreadable, stored),
    ],
)
async def test_sends_in_the_background_decide_alike(
    cluster: FakeCluster, answers: tuple[Answering, ...], given: bool
) -> None:
    plain = await story(cluster, in_the_background_without_shortcut, answers, "round_robin", given=given)
    assert await story(cluster, in_the_background, answers, "round_robin", given=given) == plain


@pytest.mark.parametrize("send", [*WAYS, in_the_background])
async def test_a_message_too_large_for_a_frame_is_a_failed_send(cluster: FakeCluster, send: Sending) -> None:
    answer_sends(cluster, stored)
    config = ProducerConfig(max_message_size=2 * MAX_FRAME, compress_over_bytes=4 * MAX_FRAME)
    async with AsyncProducer("producers", cluster.namesrv, config) as producer:
        await connect_to_all(producer)
        with pytest.raises(SendFailed) as failed:
            await send(producer, Message(TOPIC, bytes(MAX_FRAME)), None)
        assert {type(attempt.error) for attempt in failed.value.attempts} == {LocalProtocolError}
        assert await producer.drain(0)


@pytest.mark.parametrize("send", WAYS)
async def test_a_wrong_message_is_told_at_once_and_sends_nothing(cluster: FakeCluster, send: Sending) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        with pytest.raises(BodyMissing):
            await send(producer, Message(TOPIC, b""), None)
        assert await producer.drain(0)


async def test_a_send_for_a_thread_that_is_given_up_frees_its_place(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    silence = Silence()
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await connect_to_all(producer)
        answer_sends(cluster, silence)
        aim = producer.delivery.aim(MESSAGE, None, None, None)
        assert aim is not None
        started = StartedSend(*aim)
        waiting, told = pending_send(producer, started)
        await until(lambda: silence.waiting)
        assert len(asked_of(producer)) == 1
        waiting.cancel()
        assert asked_of(producer) == []
        assert isinstance(told.exception(), asyncio.CancelledError)
        silence.end()


async def test_who_waits_is_told_though_the_work_was_cancelled_before_it_began(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await connect_to_all(producer)
        aim = producer.delivery.aim(MESSAGE, None, None, None)
        assert aim is not None
        started = StartedSend(*aim)
        started.ended = SystemBusy("busy")
        waiting, told = pending_send(producer, started)
        waiting.cancel()
        await asyncio.wait([told], timeout=10)
        assert isinstance(told.exception(), asyncio.CancelledError)


async def test_a_send_in_the_background_that_is_cancelled_frees_its_place(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    silence = Silence()
    heard: list[object] = []
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await connect_to_all(producer)
        answer_sends(cluster, silence)
        first = producer.send_async(MESSAGE, lambda result, error: heard.append(type(error)))
        second = producer.send_async(MESSAGE)
        await until(lambda: len(silence.waiting) == 2)
        first.cancel()
        await until(lambda: heard)
        assert heard == [ClientClosed]
        assert len(asked_of(producer)) == 1
        silence.end()
        with pytest.raises(SendFailed):
            await second
        assert await producer.drain(1), "none is on its way any more"


async def test_a_send_in_the_background_does_not_overtake_one_that_finds_the_route(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        keyed = [Message(TOPIC, b"%d" % number, sharding_key="one") for number in range(5)]
        sent = [producer.send_async(message) for message in keyed[:2]]
        while not producer.routes.known(TOPIC):
            await asyncio.sleep(0)  # not a turn more: the first two must still be on their way
        sent += [producer.send_async(message) for message in keyed[2:]]
        assert len(producer.tasks) == 5  # none goes out at once while others still find their way
        results = await asyncio.gather(*sent)
    assert {result.queue for result in results} == {results[0].queue}
    broker = cluster.brokers[results[0].queue.broker_name]
    bodies = [command.body_bytes for command in broker.asked if command.code == RequestCode.SEND_MESSAGE_V2]
    assert sorted(bodies) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_oneway_send_is_the_same_with_and_without_shortcut(cluster: FakeCluster) -> None:
    message = Message(TOPIC, b"body", "tag", 'key "1"', properties={"a": "b"})
    async with AsyncProducer("producers", cluster.namesrv, random_source=random.Random(7)) as producer:
        answer_sends(cluster, stored)
        await connect_to_all(producer)
        (queue,) = (await producer.queues(TOPIC))[:1]
        broker = cluster.brokers[queue.broker_name]
        broker.asked.clear()
        await producer.send_oneway(message, queue=queue)
        await producer.delivery.deliver(producer.ready(message), SendKind.ONEWAY, queue, None, None)
        await until(lambda: len(sends(broker)) == 2)
        assert await producer.drain(0)
    same = [
        structs.replace(header, born_timestamp=0, properties=header.properties.partition("WAIT")[2])
        for header in sends(broker)
    ]
    assert same[0] == same[1]
    asked = [command for command in broker.asked if command.code == RequestCode.SEND_MESSAGE_V2]
    assert [(command.is_oneway, command.body_bytes) for command in asked] == [(True, b"body")] * 2


async def test_a_oneway_send_too_large_for_a_frame_fails(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    config = ProducerConfig(max_message_size=2 * MAX_FRAME, compress_over_bytes=4 * MAX_FRAME)
    async with AsyncProducer("producers", cluster.namesrv, config) as producer:
        await connect_to_all(producer)
        with pytest.raises(SendFailed):
            await producer.send_oneway(Message(TOPIC, bytes(MAX_FRAME)))
        assert await producer.drain(0)


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
    return [opaque for connection in connections if connection for opaque in connection.requests]
