"""Clients with an account against servers that look at every request's signature."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullConsumer
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.consumer.retry import Later
from downrange.client.errors import SendFailed
from downrange.client.producer.producer import AsyncProducer
from downrange.model.message import Message
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame, decode_frame, encode
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, signature
from downrange.transport.connection import Connection
from tests.support.broker_client import standalone

SECRET = b"goldenSecret1"
TOPIC = "orders"


class Guard:
    """In front of a broker: refuses what is not signed, as the plain ACL of 4.9 does, and counts what is."""

    def __init__(self, running: RunningBroker) -> None:
        self._serve = running.server.serve
        running.server.serve = self
        self.passed: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()

    def __call__(self, frames: list[Frame], origins: list[Connection]) -> None:
        for frame, origin in zip(frames, origins, strict=True):
            command = decode_frame(frame)
            problem = self._problem(command)
            if problem is None:
                self.passed[command.code] += 1
                self._serve([frame], [origin])
            else:
                self.refused[command.code] += 1
                remark = f"org.apache.rocketmq.acl.common.AclException: {problem}"
                origin.write(encode(command.reply(ResponseCode.SYSTEM_ERROR, remark)))

    def _problem(self, command: Command) -> str | None:
        fields = dict(command.ext_fields)
        if command.code == RequestCode.QUERY_MESSAGE:
            fields.pop("_UNIQUE_KEY_QUERY")
        if fields.get(ACCESS_KEY) != "user":
            return "No accessKey is configured"
        if fields.get(SIGNATURE) != signature(fields, command.body_bytes, SECRET):
            return "Check signature failed for accessKey=user"
        return None


@asynccontextmanager
async def guarded(root: Path) -> AsyncIterator[tuple[str, Guard]]:
    async with standalone(root) as running:
        yield str(running.config.broker.namesrv_addr), Guard(running)


def account(namesrv: str, secret: str = SECRET.decode()) -> ClientConfig:
    return ClientConfig((namesrv,), access_key="user", secret_key=secret)


async def test_everything_a_client_does_is_signed(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (namesrv, guard):
        me = account(namesrv)
        async with AsyncProducer("shop", me, ProducerConfig(trace=True)) as producer:
            result = await producer.send(Message(TOPIC, b"1", keys="k"))
            await producer.send_batch([Message(TOPIC, b"2"), Message(TOPIC, b"3")])
            await producer.send_oneway(Message(TOPIC, b"4"))
            seen: list[ReceivedMessage] = []

            async def answer(message: ReceivedMessage) -> Later | None:
                seen.append(message)
                if message.body == b"?":
                    await consumer.reply(message, b"!")
                return Later() if message.body == b"1" and message.reconsume_times == 0 else None

            async with AsyncPushConsumer("billing", me, ConsumerConfig(orderly=False), on_message=answer) as consumer:
                await consumer.subscribe(TOPIC)
                assert (await producer.request(Message(TOPIC, b"?"), timeout=10)).body == b"!"
                async with asyncio.timeout(30):
                    while len(seen) < 5 or not guard.passed[RequestCode.CONSUMER_SEND_MSG_BACK]:
                        await asyncio.sleep(0.01)
        async with PullConsumer("pullers", me) as puller:
            assert await puller.queues(TOPIC)
        async with Admin(me) as admin:
            assert (await admin.messages.by_unique_key(TOPIC, result.message_id)).body == b"1"
            found = await admin.messages.by_key(TOPIC, "k")
            assert any(found.done.values())
            assert (await admin.messages.by_offset_id(result.offset_message_id)).body == b"1"
    assert guard.refused == {}
    assert {
        *(RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2),
        *(RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT, RequestCode.PULL_MESSAGE),
        *(RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET),
        *(RequestCode.GET_CONSUMER_LIST_BY_GROUP, RequestCode.CONSUMER_SEND_MSG_BACK),
        *(RequestCode.QUERY_MESSAGE, RequestCode.VIEW_MESSAGE_BY_ID),
    } <= guard.passed.keys()


@pytest.mark.parametrize("who", ["nobody", "wrong secret"])
async def test_who_is_not_known_is_told_so(tmp_path: Path, who: str) -> None:
    async with guarded(tmp_path) as (namesrv, guard):
        me = ClientConfig((namesrv,)) if who == "nobody" else account(namesrv, "wrong")
        problem = "No accessKey" if who == "nobody" else "Check signature failed"
        async with AsyncProducer("shop", me) as producer:
            with pytest.raises(SendFailed, match=problem) as caught:
                await producer.send(Message(TOPIC, b"1"))
        assert isinstance(caught.value.error, BrokerError)
    assert not guard.passed
