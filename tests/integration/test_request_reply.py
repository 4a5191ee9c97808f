"""Requests and their replies, through whole brokers in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import downrange
from downrange import Message, ReceivedMessage, ReplyTimedOut, reply_to, testing
from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.errors import ClientClosed, SendFailed
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.request_reply import NotARequest
from downrange.model.message import MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.replies import PushReplyMessageRequest
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse, encode_send_v1
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import Frame, decode_frame
from downrange.transport.connection import Connection
from tests.support.broker_client import client_of, standalone
from tests.support.two_brokers import two_brokers

QUESTIONS = "questions"
REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path) as running:
        async with Admin(ClientConfig.of(running.config.broker.namesrv_addr)) as admin:
            for topic in (QUESTIONS, f"tenant%{QUESTIONS}"):  # consumers look for a new topic every two seconds only
                (await admin.topics.create(TopicConfig(topic, 1, 1), "DefaultCluster")).raise_if_none()
        yield running


@pytest.fixture
def namesrv(broker: RunningBroker) -> str:
    return str(broker.config.broker.namesrv_addr)


@pytest.fixture
async def producer(namesrv: str) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer("askers", namesrv) as running:
        yield running


# --- asking and answering


async def test_a_consumer_answers_with_one_call(namesrv: str, producer: AsyncProducer) -> None:
    async def answer(message: ReceivedMessage) -> None:
        assert await consumer.reply(message, b"echo " + message.body)

    async with AsyncPushConsumer("answerers", namesrv, on_message=answer) as consumer:
        await consumer.subscribe(QUESTIONS)
        replies = await asyncio.gather(
            *(producer.request(Message(QUESTIONS, b"%d" % number), timeout=10) for number in range(20))
        )
    assert [reply.body for reply in replies] == [b"echo %d" % number for number in range(20)]
    assert len({reply.correlation_id for reply in replies}) == 20
    assert all(int(reply.properties["ARRIVE_TIME"]) >= int(reply.properties["PUSH_REPLY_TIME"]) for reply in replies)


async def test_any_producer_may_send_a_reply(namesrv: str, producer: AsyncProducer) -> None:
    async with AsyncProducer("answerers", namesrv) as other:

        async def answer(message: ReceivedMessage) -> None:
            reply = reply_to(message, b"x" * 10_000)  # compressed on its way
            reply.tags, reply.keys, reply.properties = "T", "k1 k2", {"mood": "fine"}
            await other.send(reply)

        async with AsyncPushConsumer("answerers", namesrv, on_message=answer) as consumer:
            await consumer.subscribe(QUESTIONS)
            reply = await producer.request(Message(QUESTIONS, b"?"), timeout=10)
    assert reply.body == b"x" * 10_000
    assert (reply.tags, reply.keys, reply.properties["mood"]) == ("T", ["k1", "k2"], "fine")
    assert reply.topic == REPLY_TOPIC


async def test_replies_are_stored_as_well(broker: RunningBroker, namesrv: str, producer: AsyncProducer) -> None:
    async def answer(message: ReceivedMessage) -> None:
        await consumer.reply(message, b"kept")

    async with AsyncPushConsumer("answerers", namesrv, on_message=answer) as consumer:
        await consumer.subscribe(QUESTIONS)
        await producer.request(Message(QUESTIONS, b"?"), timeout=10)
        async with client_of(broker) as client:
            (stored,), _ = await client.pull(REPLY_TOPIC)
    assert stored.body == b"kept"
    assert stored.properties["MSG_TYPE"] == "reply"


async def test_names_in_a_namespace(namesrv: str) -> None:
    config = ProducerConfig(namespace="tenant")

    async def answer(message: ReceivedMessage) -> None:
        await consumer.reply(message, message.topic.encode())

    async with (
        AsyncProducer("askers", namesrv, config) as producer,
        AsyncPushConsumer(
            "answerers", namesrv, downrange.ConsumerConfig(namespace="tenant"), on_message=answer
        ) as consumer,
    ):
        await consumer.subscribe(QUESTIONS)
        assert (await producer.request(Message(QUESTIONS, b"?"), timeout=10)).body == QUESTIONS.encode()


def test_programs_without_an_event_loop() -> None:
    with testing.broker() as mq:
        mq.create_topic(QUESTIONS)
        threads = set()

        def answer(message: ReceivedMessage) -> None:
            threads.add(threading.current_thread())
            consumer.reply(message, message.body.upper())

        with downrange.PushConsumer("answerers", mq.namesrv, on_message=answer) as consumer:
            consumer.subscribe(QUESTIONS)
            with downrange.Producer("askers", mq.namesrv) as producer:
                assert producer.request(Message(QUESTIONS, b"loud"), timeout=10).body == b"LOUD"
                with pytest.raises(ReplyTimedOut):
                    producer.request(Message("nobody-listens", b"?"), timeout=1)
        assert threads
        assert threading.main_thread() not in threads


# --- when it does not work


async def test_no_reply_in_time(namesrv: str, producer: AsyncProducer) -> None:
    await producer.send(Message(QUESTIONS, b"first"))
    with pytest.raises(ReplyTimedOut, match=r"request to questions: no reply within 1 s") as caught:
        await producer.request(Message(QUESTIONS, b"?"), timeout=1)
    assert caught.value.code == 10006


async def test_a_late_reply_reaches_nobody_and_does_no_harm(namesrv: str, producer: AsyncProducer) -> None:
    held: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
    async with AsyncPushConsumer("answerers", namesrv, on_message=held.put) as consumer:
        await consumer.subscribe(QUESTIONS)
        with pytest.raises(ReplyTimedOut):
            await producer.request(Message(QUESTIONS, b"?"), timeout=1)
        async with asyncio.timeout(30):
            late = await held.get()
        # The producer is there and takes the reply, as in RocketMQ: only nobody waits for it any more.
        assert await consumer.reply(late, b"late")
        asking = asyncio.create_task(producer.request(Message(QUESTIONS, b"again"), timeout=10))
        assert await consumer.reply(await held.get(), b"in time")
        assert (await asking).body == b"in time"


async def test_who_asked_is_gone(namesrv: str) -> None:
    held: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
    async with AsyncPushConsumer("answerers", namesrv, on_message=held.put) as consumer:
        await consumer.subscribe(QUESTIONS)
        async with AsyncProducer("askers", namesrv) as producer:
            with pytest.raises(ReplyTimedOut):
                await producer.request(Message(QUESTIONS, b"?"), timeout=1)
        async with asyncio.timeout(30):
            question = await held.get()
        assert not await consumer.reply(question, b"anybody there?")
        async with AsyncProducer("answerers", namesrv) as other:
            with pytest.raises(SendFailed, match=r"channel of <.*> not found") as caught:
                await other.send(reply_to(question, b"anybody there?"))
    assert caught.value.code == ResponseCode.SYSTEM_ERROR


async def test_a_message_that_asks_nothing_has_no_reply(namesrv: str, producer: AsyncProducer) -> None:
    held: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
    async with AsyncPushConsumer("answerers", namesrv, on_message=held.put) as consumer:
        await consumer.subscribe(QUESTIONS)
        await producer.send(Message(QUESTIONS, b"a statement"))
        async with asyncio.timeout(30):
            with pytest.raises(NotARequest, match="has no property CORRELATION_ID"):
                await consumer.reply(await held.get(), b"answer")


async def test_a_closed_producer_waits_no_longer(namesrv: str) -> None:
    producer = await AsyncProducer("askers", namesrv).start()
    await producer.send(Message(QUESTIONS, b"first"))
    asking = asyncio.create_task(producer.request(Message(QUESTIONS, b"?"), timeout=60))
    await asyncio.sleep(0)
    await producer.close(timeout=0.2)
    with pytest.raises(ClientClosed):
        await asking


async def test_a_topic_that_cannot_be_sent_to(namesrv: str, producer: AsyncProducer) -> None:
    with pytest.raises(downrange.MessageError):
        await producer.request(Message("SCHEDULE_TOPIC_XXXX", b"?"))


# --- two brokers


async def test_the_reply_comes_through_a_broker_that_does_not_serve_the_topic(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            broker_a = cluster.a.config.broker.address
            (await admin.topics.create(TopicConfig(QUESTIONS, 1, 1), broker=broker_a)).raise_if_none()
        held: asyncio.Queue[ReceivedMessage] = asyncio.Queue()
        async with (
            AsyncProducer("askers", cluster.namesrv) as producer,
            AsyncProducer("answerers", cluster.namesrv) as other,
            AsyncPushConsumer("answerers", cluster.namesrv, on_message=held.put) as consumer,
        ):
            await consumer.subscribe(QUESTIONS)
            for broker_name in ("broker-b", "broker-a"):
                asking = asyncio.create_task(producer.request(Message(QUESTIONS, b"?"), timeout=10))
                async with asyncio.timeout(30):
                    question = await held.get()
                assert question.broker_name == "broker-a"
                through = MessageQueue(REPLY_TOPIC, broker_name, 0)
                await other.send(reply_to(question, broker_name.encode()), queue=through)
                assert (await asking).body == broker_name.encode()


async def test_a_request_after_the_broker_lost_its_connections(namesrv: str, broker: RunningBroker) -> None:
    async def answer(message: ReceivedMessage) -> None:
        await consumer.reply(message, b"pong")

    async with (
        AsyncProducer("askers", namesrv) as producer,
        AsyncPushConsumer("answerers", namesrv, on_message=answer) as consumer,
    ):
        await consumer.subscribe(QUESTIONS)
        assert (await producer.request(Message(QUESTIONS, b"ping"), timeout=10)).body == b"pong"
        connection = producer.session.connection(broker.config.broker.address)
        assert connection is not None
        connection.close()
        # The broker has forgotten the producer with its connection; the next heartbeat would be due in 30 s.
        assert (await producer.request(Message(QUESTIONS, b"ping"), timeout=10)).body == b"pong"


async def test_a_broker_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with two_brokers(tmp_path) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            broker_a = cluster.a.config.broker.address
            (await admin.topics.create(TopicConfig(QUESTIONS, 1, 1), broker=broker_a)).raise_if_none()
        hung: list[Command] = []

        serve = cluster.b.server.serve

        def hang(frames: list[Frame], origins: list[Connection]) -> None:
            for frame, origin in zip(frames, origins, strict=True):
                command = decode_frame(frame)
                if command.code != RequestCode.HEART_BEAT:
                    serve([frame], [origin])
                else:
                    hung.append(command)

        async def answer(message: ReceivedMessage) -> None:
            await consumer.reply(message, b"pong")

        async with AsyncPushConsumer("answerers", cluster.namesrv, on_message=answer) as consumer:
            await consumer.subscribe(QUESTIONS)
            cluster.b.server.serve = hang
            patient = replace(ClientConfig.of(cluster.namesrv), request_timeout_seconds=60)
            async with AsyncProducer("askers", patient) as producer:
                for _ in range(2):  # not only when the heartbeat is given up
                    assert (await producer.request(Message(QUESTIONS, b"ping"), timeout=30)).body == b"pong"
                assert hung
            assert not [task for task in asyncio.all_tasks() if "heartbeat of requests" in task.get_name()]


# --- the broker's side, seen by single requests


def a_reply(client_id: str | None, body: bytes = b"answer") -> SendMessageRequest:
    to = "" if client_id is None else f"REPLY_TO_CLIENT\x01{client_id}\x02"
    return SendMessageRequest(
        producer_group="answerers",
        topic=REPLY_TOPIC,
        queue_id=0,
        born_timestamp=1_700_000_000_000,
        properties=f"MSG_TYPE\x01reply\x02CORRELATION_ID\x01c-1\x02{to}",
    )


@pytest.mark.parametrize("code", [RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2])
async def test_both_forms_of_a_reply_are_pushed(broker: RunningBroker, code: RequestCode) -> None:
    pushed: list[Command] = []

    def take(command: Command, connection: Connection) -> Command:
        pushed.append(command)
        return command.reply()

    async with client_of(broker, "asker@1", take) as asker, client_of(broker, "answerer@1") as answerer:
        await asker.heartbeat(produce=("askers",))
        header = a_reply("asker@1")
        command = request(code, header, body=b"answer")
        if code == RequestCode.SEND_REPLY_MESSAGE:
            command = request(code, ext_fields=encode_send_v1(header), body=b"answer")
        answer = (await answerer.ask(command)).header(SendMessageResponse)
    assert answer.queue_offset == 0
    assert len(answer.msg_id) == 32
    (push,) = pushed
    assert push.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
    assert push.body_bytes == b"answer"
    told = push.header(PushReplyMessageRequest)
    assert told.topic == REPLY_TOPIC
    assert told.store_host == broker.config.broker.address
    assert told.born_host.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("client_id", "remark"),
    [
        (None, "reply message properties[REPLY_TO_CLIENT] is null"),
        ("nobody@1", "push reply message fail, channel of <nobody@1> not found."),
        ("refuser@1", "push reply message to refuser@1fail."),
    ],
)
async def test_a_reply_that_cannot_be_pushed_is_refused_and_kept(
    broker: RunningBroker, client_id: str | None, remark: str
) -> None:
    async with client_of(broker, "refuser@1") as refuser, client_of(broker, "answerer@1") as answerer:
        await refuser.heartbeat(produce=("askers",))
        command = request(RequestCode.SEND_REPLY_MESSAGE_V2, a_reply(client_id), body=b"answer")
        reply = await answerer.ask(command, ResponseCode.SYSTEM_ERROR)
        assert reply.remark == remark
        (stored,), _ = await answerer.pull(REPLY_TOPIC)
    assert stored.body == b"answer"


async def test_replies_need_not_be_stored(tmp_path: Path) -> None:
    async with (
        standalone(tmp_path, broker_options={"store_reply_message_enable": False}) as running,
        client_of(running, "asker@1", lambda command, _: command.reply()) as asker,
        client_of(running, "answerer@1") as answerer,
    ):
        await asker.heartbeat(produce=("askers",))
        command = request(RequestCode.SEND_REPLY_MESSAGE_V2, a_reply("asker@1"), body=b"answer")
        answer = (await answerer.ask(command)).header(SendMessageResponse)
        assert (answer.msg_id, answer.queue_offset) == ("0", 0)
        assert running.store.max_offset_of(REPLY_TOPIC, 0) == 0
        command = request(RequestCode.SEND_REPLY_MESSAGE_V2, a_reply("nobody@1"), body=b"answer")
        refused = await answerer.ask(command, ResponseCode.SYSTEM_ERROR)
        assert refused.ext_fields.keys() == {"MSG_REGION", "TRACE_ON"}


@pytest.mark.parametrize(("topic", "code"), [("no such topic", 1), ("RMQ_SYS_TRANS_HALF_TOPIC", 16)])
async def test_a_reply_to_a_topic_that_cannot_be_written(broker: RunningBroker, topic: str, code: int) -> None:
    async with client_of(broker) as client:
        fields = {**request(0, a_reply("asker@1")).ext_fields, "b": topic}
        await client.ask(request(RequestCode.SEND_REPLY_MESSAGE_V2, ext_fields=fields, body=b"answer"), code)
