"""Requests and replies as the genuine clients write and read them."""

from __future__ import annotations

import asyncio
from typing import NamedTuple, cast

import pytest

from downrange.client.config import ProducerConfig
from downrange.client.producer.outgoing import OutgoingRules, make_outgoing
from downrange.client.producer.request_reply import AwaitedReplies, NotARequest, as_reply, reply_to
from downrange.clock import ManualClock
from downrange.model.errors import MessageError
from downrange.model.properties import decode_properties
from downrange.model.record import decode_records
from downrange.protocol.bodies.replies import PushReplyMessageRequest
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from tests.support.golden import scenarios
from tests.support.replay import decode

CAPTURES = ["498-json/request_reply", "498-binary/request_reply", "533-client-498-server/request_reply"]
NOWHERE = cast(Connection, None)


def captured(scenario: str, code: int) -> Command:
    return next(decode(row.frame) for row in scenarios()[scenario] if row.code == code and not row.is_response)


class Received(NamedTuple):
    properties_text: str
    message_id: str = "ID"


@pytest.mark.parametrize("scenario", CAPTURES)
def test_a_reply_is_what_the_genuine_client_makes_of_a_request(scenario: str) -> None:
    (question,) = [
        record
        for row in scenarios()[scenario]
        if row.is_response and "PULL_MESSAGE" in row.note and row.code == ResponseCode.SUCCESS
        for record in decode_records(decode(row.frame).body_bytes)
        if record.tags == "ask"
    ]
    genuine = captured(scenario, RequestCode.SEND_REPLY_MESSAGE_V2)
    header = genuine.header(SendMessageRequest)
    reply = reply_to(question, genuine.body_bytes)
    assert reply.topic == header.topic
    ready = as_reply(make_outgoing(reply, "namespace%topic", "UNIQUE", 0, 0, OutgoingRules.of(ProducerConfig())), reply)
    assert (ready.code, ready.topic) == (genuine.code, header.topic)
    theirs, ours = decode_properties(header.properties), decode_properties(ready.properties)
    for properties in (theirs, ours):
        properties.pop("UNIQ_KEY")
        properties.pop("WAIT", None)
    assert ours == theirs


@pytest.mark.parametrize("missing", ["CLUSTER", "CORRELATION_ID", "REPLY_TO_CLIENT"])
def test_only_a_request_has_a_reply(missing: str) -> None:
    properties = {"CLUSTER": "C", "CORRELATION_ID": "1", "REPLY_TO_CLIENT": "me"}
    assert reply_to(Received("\x02".join(f"{k}\x01{v}" for k, v in properties.items())), b"x").ttl_millis is None
    del properties[missing]
    with pytest.raises(NotARequest, match=f"ID cannot be replied to: it has no property {missing}"):
        reply_to(Received("\x02".join(f"{k}\x01{v}" for k, v in properties.items())), b"x")


@pytest.mark.parametrize("scenario", CAPTURES)
async def test_a_genuine_brokers_push_is_taken(scenario: str) -> None:
    push = captured(scenario, RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT)
    header = push.header(PushReplyMessageRequest)
    awaited = AwaitedReplies(ManualClock(1_800_000_000_000))
    waiting = awaited.expect(decode_properties(header.properties)["CORRELATION_ID"])
    assert awaited(push, NOWHERE).code == ResponseCode.SUCCESS
    reply = await waiting
    await asyncio.sleep(0)
    assert reply.body == push.body_bytes
    assert (reply.topic, reply.born_host, reply.store_host) == (header.topic, header.born_host, header.store_host)
    assert reply.properties["ARRIVE_TIME"] == "1800000000000"
    assert repr(awaited) == "<AwaitedReplies waiting=0>"
    assert awaited(push, NOWHERE).code == ResponseCode.SUCCESS, "nobody waits any more: taken and dropped"


async def test_a_reply_that_cannot_be_read_is_told_to_both() -> None:
    header = PushReplyMessageRequest(
        producer_group="g",
        topic="T",
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=1,
        born_timestamp=1,
        flag=0,
        properties="CORRELATION_ID\x01c-1\x02",
        born_host="h:1",
        store_host="h:2",
        store_timestamp=2,
    )
    awaited = AwaitedReplies(ManualClock())
    waiting = awaited.expect("c-1")
    with pytest.raises(MessageError, match="the reply from h:1 cannot be decompressed"):
        awaited(request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body=b"not zlib"), NOWHERE)
    with pytest.raises(MessageError):
        await waiting


async def test_a_request_that_was_given_up_is_forgotten() -> None:
    awaited = AwaitedReplies(ManualClock())
    awaited.expect("c-1").cancel()
    await asyncio.sleep(0)
    assert repr(awaited) == "<AwaitedReplies waiting=0>"
