"""Traces of producers and consumers through a whole broker, and what `downrange trace` makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from downrange import (
    Acknowledged,
    AsyncLitePullConsumer,
    AsyncSimpleConsumer,
    AsyncTransactionProducer,
    ConsumeFromWhere,
    ConsumerConfig,
    HalfSent,
    Later,
    LitePullConfig,
    LocalTransactionState,
    Message,
    Producer,
    ProducerConfig,
    ReceivedMessage,
    SimpleConsumerConfig,
    testing,
)
from downrange.broker.app import RunningBroker
from downrange.cli.main import app
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.blocking import PushConsumer
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import MessageNotFound, NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.trace import ConsumeCode, MessageType
from downrange.client.trace_reader import MessageTrace
from downrange.model.topics import TRACE_TOPIC, TopicConfig
from tests.support.broker_client import standalone

TOPIC = "orders"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path) as running:
        async with Admin(ClientConfig.of(running.config.broker.namesrv_addr)) as admin:
            for topic in (TOPIC, f"ns%{TOPIC}"):
                (await admin.topics.create(TopicConfig(topic, 1, 1), "DefaultCluster")).raise_if_none()
        yield running


@pytest.fixture
def namesrv(broker: RunningBroker) -> str:
    return str(broker.config.broker.namesrv_addr)


async def sent(namesrv: str, *messages: Message, **options: str) -> list[str]:
    async with AsyncProducer("shop", namesrv, ProducerConfig(trace=True, **options)) as producer:  # type: ignore[arg-type]
        return [(await producer.send(message)).message_id for message in messages]


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def trace(namesrv: str, message_id: str) -> MessageTrace:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        return await admin.messages.trace(message_id)


async def is_committed(namesrv: str, transaction_id: str) -> bool:
    try:
        found = await trace(namesrv, transaction_id)
    except (MessageNotFound, NoRoute):
        return False
    return any(end.state == "COMMIT_MESSAGE" for end in found.transactions)


# --- what is written


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
async def test_the_whole_life_of_a_message(namesrv: str, orderly: bool, is_async: bool) -> None:
    (message_id,) = await sent(namesrv, Message(TOPIC, b"x", tags="T", keys="k1 k2"))
    seen: list[ReceivedMessage] = []

    async def asynchronous(message: ReceivedMessage) -> None:
        seen.append(message)

    callback = asynchronous if is_async else seen.append
    config = ConsumerConfig(orderly=orderly, trace=True)
    async with AsyncPushConsumer("billing", namesrv, config, on_message=callback) as consumer:
        await consumer.subscribe(TOPIC)
        await until(lambda: seen)
    found = await trace(namesrv, message_id)
    (send,) = found.sends
    assert (send.group, send.topic, send.tags, send.keys, send.body_length) == ("shop", TOPIC, "T", "k1 k2", 1)
    (delivery,) = found.deliveries
    assert (delivery.group, delivery.retry_times) == ("billing", 0)
    assert (delivery.success, delivery.code) == (True, ConsumeCode.SUCCESS)
    assert delivery.timestamp >= send.timestamp
    async with Admin(ClientConfig.of(namesrv)) as admin:
        by_key = await admin.messages.by_key(TRACE_TOPIC, "k2")
    assert sum(map(len, by_key.done.values())) == 2


async def test_a_lite_pull_consumer_tells_what_it_handed_out(namesrv: str) -> None:
    (message_id,) = await sent(namesrv, Message(TOPIC, b"x"))
    async with AsyncLitePullConsumer("lookers", namesrv, LitePullConfig(trace=True)) as consumer:
        await consumer.subscribe(TOPIC)
        assert len(await consumer.poll(timeout=60)) == 1
    (delivery,) = (await trace(namesrv, message_id)).deliveries
    assert (delivery.group, delivery.success, delivery.code) == ("lookers", True, ConsumeCode.SUCCESS)


async def test_a_simple_consumer_tells_what_it_received_and_what_became_of_it(namesrv: str) -> None:
    bodies = [b"acknowledged", b"given up", b"left alone", b"acknowledged with others"]
    ids = dict(zip(bodies, await sent(namesrv, *(Message(TOPIC, body) for body in bodies)), strict=True))
    config = SimpleConsumerConfig(trace=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with AsyncSimpleConsumer("billing", namesrv, config) as consumer:
        await consumer.subscribe(TOPIC)
        received: dict[bytes, PoppedMessage] = {}
        while len(received) < len(bodies):
            received |= {message.body: message for message in await consumer.receive(16, 60)}
        await consumer.ack(received[b"acknowledged"])
        await consumer.ack(received[b"acknowledged"])
        await consumer.forward_to_dead_letter_queue(received[b"given up"])
        await consumer.change_invisible_duration(received[b"acknowledged with others"], 90)
        await consumer.ack_many([received[b"acknowledged with others"]])
    outcomes = {}
    for body, message_id in ids.items():
        (delivery,) = (await trace(namesrv, message_id)).deliveries
        assert (delivery.group, delivery.retry_times) == ("billing", 0)
        outcomes[body] = (delivery.success, delivery.code)
    assert outcomes == {
        b"acknowledged": (True, ConsumeCode.SUCCESS),
        b"given up": (False, ConsumeCode.FAILED),
        b"left alone": (None, None),
        b"acknowledged with others": (True, ConsumeCode.SUCCESS),
    }


async def test_every_delivery_of_a_retried_message_is_told(namesrv: str) -> None:
    (message_id,) = await sent(namesrv, Message(TOPIC, b"x"))
    attempts = []

    async def third_time_lucky(message: ReceivedMessage) -> Later | None:
        attempts.append(message.reconsume_times)
        if len(attempts) == 1:
            raise ValueError("not today")
        return Later(suspend_seconds=0.01) if len(attempts) == 2 else None

    config = ConsumerConfig(orderly=True, suspend_current_queue_seconds=0.01, trace=True)
    async with AsyncPushConsumer("billing", namesrv, config, on_message=third_time_lucky) as consumer:
        await consumer.subscribe(TOPIC)
        await until(lambda: len(attempts) == 3)
    found = await trace(namesrv, message_id)
    assert [(one.retry_times, one.success, one.code) for one in found.deliveries] == [
        (0, False, ConsumeCode.EXCEPTION),
        (1, False, ConsumeCode.FAILED),
        (2, True, ConsumeCode.SUCCESS),
    ]


async def test_a_batch_that_is_done_in_part(namesrv: str) -> None:
    ids = await sent(namesrv, Message(TOPIC, b"1"), Message(TOPIC, b"2"))
    calls: list[int] = []

    async def first_only(messages: Sequence[ReceivedMessage]) -> Acknowledged:
        calls.append(len(messages))
        return Acknowledged(1)

    config = ConsumerConfig(consume_message_batch_max_size=8, trace=True)
    async with AsyncPushConsumer("billing", namesrv, config, on_batch=first_only) as consumer:
        await consumer.subscribe(TOPIC)
        await until(lambda: calls)
    assert calls == [2]
    ends = [(await trace(namesrv, message_id)).deliveries[0] for message_id in ids]
    assert [(end.success, end.code) for end in ends] == [(True, ConsumeCode.SUCCESS), (False, ConsumeCode.FAILED)]


async def test_a_callback_that_has_not_ended(namesrv: str) -> None:
    (message_id,) = await sent(namesrv, Message(TOPIC, b"x"))
    begun = asyncio.Event()

    async def never(message: ReceivedMessage) -> None:
        begun.set()
        await asyncio.Event().wait()

    consumer = AsyncPushConsumer("billing", namesrv, ConsumerConfig(trace=True), on_message=never)
    await consumer.subscribe(TOPIC)
    await consumer.start()
    await begun.wait()
    await consumer.close(timeout=0.05)
    (delivery,) = (await trace(namesrv, message_id)).deliveries
    assert (delivery.success, delivery.cost_millis) == (None, None)


async def test_a_consumer_of_the_trace_topic_reports_nothing_about_it(namesrv: str, broker: RunningBroker) -> None:
    await sent(namesrv, Message(TOPIC, b"x"))
    seen: list[ReceivedMessage] = []
    async with AsyncPushConsumer("auditors", namesrv, ConsumerConfig(trace=True), on_message=seen.append) as consumer:
        await consumer.subscribe(TRACE_TOPIC)
        await until(lambda: seen)
    assert sum(broker.store.max_offset_of(TRACE_TOPIC, queue_id) for queue_id in range(4)) == 1


async def test_names_are_told_without_their_namespace(namesrv: str) -> None:
    (message_id,) = await sent(namesrv, Message(TOPIC, b"x"), namespace="ns")
    seen: list[ReceivedMessage] = []
    config = ConsumerConfig(trace=True, namespace="ns")
    async with AsyncPushConsumer("billing", namesrv, config, on_message=seen.append) as consumer:
        await consumer.subscribe(TOPIC)
        await until(lambda: seen)
    found = await trace(namesrv, message_id)
    assert ([one.group for one in found.sends], list(found.groups)) == (["shop"], ["billing"])


async def test_no_trace_unless_asked_for(namesrv: str) -> None:
    async with AsyncProducer("shop", namesrv) as producer:
        result = await producer.send(Message(TOPIC, b"x"))
    seen: list[ReceivedMessage] = []
    async with AsyncPushConsumer("billing", namesrv, on_message=seen.append) as consumer:
        await consumer.subscribe(TOPIC)
        await until(lambda: seen)
    await sent(namesrv, Message(TOPIC, b"so that there is a trace topic"))
    with pytest.raises(MessageNotFound, match="only if told to"):
        await trace(namesrv, result.message_id)


@pytest.mark.parametrize("is_asked", [False, True])
async def test_the_end_of_a_transaction_is_told(tmp_path: Path, is_asked: bool) -> None:
    asked = asyncio.Event()

    async def execute(half: HalfSent) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN if is_asked else LocalTransactionState.ROLLBACK

    async def check(message: ReceivedMessage) -> LocalTransactionState:
        asked.set()
        return LocalTransactionState.COMMIT

    often = {"transaction_time_out": 50, "transaction_check_interval": 20}
    async with standalone(tmp_path, broker_options=often if is_asked else {}) as running:
        namesrv = str(running.config.broker.namesrv_addr)
        config = ProducerConfig(trace=True)
        async with AsyncTransactionProducer("payers", namesrv, config, check=check) as producer:
            result = await producer.send_in_transaction(Message(TOPIC, b"x", keys="k"), execute)
            if is_asked:
                await until(asked.is_set)
                # A producer that closes leaves out the answer that it is about to give.
                async with asyncio.timeout(20):
                    while not await is_committed(namesrv, result.transaction_id):
                        await asyncio.sleep(0.05)
        found = await trace(namesrv, result.transaction_id)
    assert [send.message_type for send in found.sends] == [MessageType.HALF]
    expected = [("UNKNOW", False), ("COMMIT_MESSAGE", True)] if is_asked else [("ROLLBACK_MESSAGE", False)]
    ends = [(end.state, end.from_check) for end in found.transactions]
    assert set(ends) == set(expected), "a broker may ask twice, and before the first end arrives"
    assert {(end.group, end.transaction_id) for end in found.transactions} == {("payers", result.transaction_id)}


# --- what is drawn


def test_the_command_draws_a_readable_line_of_life() -> None:
    with testing.broker() as mq:
        mq.create_topic(TOPIC, queues=1)
        with Producer("shop", mq.namesrv, ProducerConfig(trace=True)) as producer:
            result = producer.send(Message(TOPIC, b"12345", tags="T", keys="k1"))
        for group in ("billing", "shipping"):
            with PushConsumer(group, mq.namesrv, ConsumerConfig(trace=True)) as consumer:
                consumer.subscribe(TOPIC)
                assert next(iter(consumer)).body == b"12345"
        plain = CliRunner().invoke(app, ["trace", result.message_id, "-n", mq.namesrv])
        document = json.loads(
            CliRunner().invoke(app, ["trace", result.offset_message_id, "-n", mq.namesrv, "--json"]).stdout
        )
        unknown = CliRunner().invoke(app, ["trace", "0" * 32, "-n", mq.namesrv])
    lines = plain.stdout.splitlines()
    assert lines[0] == f"Message {result.message_id}"
    assert lines[1] == f"  topic {TOPIC}   tag T   keys k1   body 5 bytes"
    assert lines[3].startswith("● sent ")
    assert "by shop at 127.0.0.1, success after " in lines[3]
    assert lines[4].startswith("● stored ")
    assert lines[4].endswith(f"{TOPIC} queue 0 offset 0")
    assert [line for line in lines if "consumed by" in line] == ["├ consumed by billing", "└ consumed by shipping"]
    assert document["msgId"] == result.message_id
    assert document["stored"]["offsetMsgId"] == result.offset_message_id
    assert [one["group"] for one in document["deliveries"]] == ["billing", "shipping"]
    assert isinstance(unknown.exception, MessageNotFound)
    assert "\n" not in str(unknown.exception)
