"""Traces of sends: what is written, and that it never touches the messages themselves."""

from __future__ import annotations

import asyncio

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.producer.hooks import SendContext
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult, SendStatus
from downrange.client.trace import encode_pub
from downrange.client.trace_reader import trace_of
from downrange.client.trace_writer import MAX_TRACE_BYTES, MAX_WAITING, TraceWriter
from downrange.clock import ManualClock
from downrange.model.message import Message, MessageQueue
from downrange.model.properties import MAX_PROPERTIES_BYTES
from downrange.model.topics import TRACE_TOPIC
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.command import Command
from downrange.protocol.framing import FrameDecoder
from downrange.transport.errors import ConnectFailed
from tests.support.golden import scenarios
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply
from tests.unit.client.scripted import SEND, answer_sends, producer_of, stored


def test_an_entry_equals_the_genuine_clients() -> None:
    for row in scenarios()["498-json/trace"]:
        (command,) = FrameDecoder().feed(row.frame)
        if command.code == SEND and row.sender == "client" and command.body_bytes.startswith(b"Pub"):
            break
    text = command.body_bytes.decode()
    _, timestamp, region, group, topic, message_id, tags, keys, host, length, cost, _, offset_id, _ = text.split("\x01")
    message = Message(topic, b"x" * int(length), tags=tags, keys=keys)
    ours = encode_pub(
        timestamp=int(timestamp),
        region_id=region,
        group=group,
        message=message,
        message_id=message_id,
        store_host=host,
        cost_millis=int(cost),
        offset_message_id=offset_id,
    )
    assert ours == text


def test_a_delayed_message_without_tag_and_key() -> None:
    entry = encode_pub(
        timestamp=1,
        region_id="R",
        group="g",
        message=Message("T", b"abc", delay_level=2),
        message_id="ID",
        store_host="h:1",
        cost_millis=5,
        offset_message_id="O",
    )
    fields = entry.rstrip("\x02").split("\x01")
    assert fields[6:8] == ["null", "null"]
    assert fields[9:12] == ["3", "5", "3"]
    (sent,) = trace_of("ID", [(entry, "h")]).sends
    assert (sent.group, sent.success, sent.cost_millis) == ("g", True, 5)
    assert (sent.tags, sent.keys) == (None, None)


def traces(cluster: FakeCluster) -> list[tuple[SendMessageRequest, Command]]:
    return [
        (command.header(SendMessageRequest), command)
        for broker in cluster.brokers.values()
        for command in broker.asked
        if command.code == SEND and command.ext_fields["b"] == TRACE_TOPIC
    ]


async def test_sends_are_reported_in_the_background_and_can_be_read_back(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    before = asyncio.all_tasks()
    async with producer_of(cluster.namesrv, config=ProducerConfig(trace=True, namespace="ns")) as producer:
        one = await producer.send(Message(TOPIC, b"body", tags="A", keys="k1 k2"))
        batch = await producer.send_batch([Message(TOPIC, b"x"), Message(TOPIC, b"y")])
        await producer.send_oneway(Message(TOPIC, b"nobody knows"))
    assert asyncio.all_tasks() == before
    (header, command) = traces(cluster)[0]
    assert header.producer_group.startswith("_INNER_TRACE_PRODUCER-ns%producers-PRODUCE-")
    assert f"KEYS\x01{one.message_id} k1 k2 {batch[0].message_id}" in header.properties
    body = command.body_bytes.decode()
    for result in (one, *batch):
        (sent,) = trace_of(result.message_id, [(body, "host")]).sends
        assert (sent.group, sent.success) == ("producers", True)
    assert body.count("\x02") == 3


async def test_a_broker_can_switch_traces_off_and_failed_sends_have_none(cluster: FakeCluster) -> None:
    def untraced(command: Command) -> Command:
        return command.reply(ext_fields={**stored(command).ext_fields, "TRACE_ON": "false"})

    answer_sends(cluster, untraced)
    async with producer_of(cluster.namesrv, config=ProducerConfig(trace=True)) as producer:
        await producer.send(Message(TOPIC, b"x"))
        answer_sends(cluster, reply(13))
        with pytest.raises(Exception, match="not sent"):
            await producer.send(Message(TOPIC, b"x"))
    assert traces(cluster) == []


async def settle() -> None:
    """Let the writer begin its pause."""
    for _ in range(3):
        await asyncio.sleep(0)


def context(number: int, key_bytes: int = 0) -> SendContext:
    result = SendResult(SendStatus.SEND_OK, f"{number:032d}", "O" * 32, MessageQueue("T", "b", 0), number)
    return SendContext(
        producer_group="g",
        namespace="",
        kind=SendKind.SYNC,
        messages=[Message("T", b"x", keys="k" * key_bytes or None)],
        message_ids=[result.message_id],
        queue=result.queue,
        broker_address="h:1",
        started=1,
        results=[result],
    )


async def test_traces_are_gathered_for_half_a_second_and_packed_within_limits() -> None:
    clock = ManualClock()
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def close() -> None:
        pass

    writer = TraceWriter(send, close, clock, TRACE_TOPIC)
    for number in range(1000):
        writer.after_send(context(number, key_bytes=100))
    await settle()
    await clock.advance(0.4)
    assert sent == []
    await clock.advance(0.2)
    assert "waiting=0" in repr(writer)
    assert sum(message.body.count(b"\x02") for message in sent) == 1000
    assert all(len(message.body) <= MAX_TRACE_BYTES for message in sent)
    assert all(len((message.keys or "").encode()) < MAX_PROPERTIES_BYTES - 1000 for message in sent)
    assert len(sent) < 20
    writer.after_send(context(1))
    await writer.close()
    assert sent[-1].body.count(b"\x02") == 1


async def test_traces_that_cannot_be_written_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()

    async def send(message: Message) -> None:
        raise ConnectFailed("nobody there")

    async def close() -> None:
        pass

    writer = TraceWriter(send, close, clock, TRACE_TOPIC)
    for number in range(MAX_WAITING + 5):
        writer.after_send(context(number))
    await settle()
    await clock.advance(0.6)
    assert "traces dropped count=5" in caplog.text
    assert "nobody there" in caplog.text
    await writer.close()
