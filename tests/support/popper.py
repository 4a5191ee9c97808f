"""A POP consumer reduced to its requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from downrange.broker.app import RunningBroker
from downrange.model.message import StoredMessage
from downrange.model.record import decode_records
from downrange.model.topics import pop_retry_topic
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.pop import (
    AckMessageRequest,
    BatchAck,
    BatchAckMessageBody,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    encode_bits,
    handles_of,
)
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from tests.support.broker_client import BrokerClient, client_of

NOTHING = int(ResponseCode.POLLING_TIMEOUT)


@dataclass(frozen=True)
class Held:
    """A message that was popped, and its handle."""

    message: StoredMessage
    handle: ReceiptHandle

    @property
    def body(self) -> bytes:
        return self.message.body


class Popper:
    """Pops and acknowledges messages of one topic for one group."""

    def __init__(self, client: BrokerClient, topic: str = "orders", group: str = "poppers") -> None:
        self.client = client
        self.topic = topic
        self.group = group

    def pop_command(
        self,
        *,
        queue_id: int = -1,
        most: int = 32,
        invisible: int = 30_000,
        poll: int = 0,
        exp_type: str = "TAG",
        exp: str = "*",
        order: bool = False,
        attempt: str | None = None,
        init_mode: int = 0,
        born: int = 0,
    ) -> Command:
        return request(
            RequestCode.POP_MESSAGE,
            PopMessageRequest(
                consumer_group=self.group,
                topic=self.topic,
                queue_id=queue_id,
                max_msg_nums=most,
                invisible_time=invisible,
                poll_time=poll,
                born_time=born,
                init_mode=init_mode,
                exp_type=exp_type,
                exp=exp,
                order=order,
                attempt_id=attempt,
            ),
        )

    async def answer(self, *, expect: int = 0, **options: object) -> Command:
        return await self.client.ask(self.pop_command(**options), expect, timeout=60)  # type: ignore[arg-type]

    async def pop(self, **options: object) -> list[Held]:
        """Messages; none when there are none."""
        command = self.pop_command(**options)  # type: ignore[arg-type]
        reply = await self.client.connection.request(command, 60)
        if reply.code == NOTHING:
            return []
        assert reply.code == ResponseCode.SUCCESS, f"code {reply.code}: {reply.remark}"
        return held(reply)

    def source(self, handle: ReceiptHandle) -> str:
        if not handle.retry_flag:
            return self.topic
        return pop_retry_topic(self.group, self.topic, version=handle.retry_flag)

    async def ack(self, *held: Held, expect: int = 0) -> None:
        for each in held:
            await self.client.ask(self.ack_command(each.handle), expect)

    def ack_command(self, handle: ReceiptHandle) -> Command:
        return request(
            RequestCode.ACK_MESSAGE,
            AckMessageRequest(
                consumer_group=self.group,
                topic=self.source(handle),
                queue_id=handle.queue_id,
                extra_info=str(handle),
                offset=handle.offset,
            ),
        )

    async def batch_ack(self, held: Iterable[Held], expect: int = 0) -> None:
        await self.client.ask(request(RequestCode.BATCH_ACK_MESSAGE, body=self.batch_body(held)), expect)

    def batch_body(self, held: Iterable[Held]) -> bytes:
        groups: dict[ReceiptHandle, list[int]] = {}
        for each in held:
            groups.setdefault(each.handle._replace(offset=0), []).append(each.handle.offset)
        acks = tuple(
            BatchAck(
                consumer_group=self.group,
                topic=self.topic,
                retry=str(handle.retry_flag),
                start_offset=handle.start_offset,
                queue_id=handle.queue_id,
                revive_queue_id=handle.revive_queue,
                pop_time=handle.pop_time,
                invisible_time=handle.invisible_time,
                bits=encode_bits(offsets, handle.start_offset),
            )
            for handle, offsets in groups.items()
        )
        return encode_body(BatchAckMessageBody(broker_name="broker-a", acks=acks))

    async def change(self, held: Held, invisible: int) -> Held:
        """Change the invisible time; returns the message with its new handle."""
        handle = held.handle
        header = ChangeInvisibleTimeRequest(
            consumer_group=self.group,
            topic=self.source(handle),
            queue_id=handle.queue_id,
            extra_info=str(handle),
            offset=handle.offset,
            invisible_time=invisible,
        )
        reply = await self.client.ask(request(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header))
        changed = reply.header(ChangeInvisibleTimeResponse)
        start = handle.start_offset if handle.is_orderly else handle.offset
        return Held(
            held.message,
            handle._replace(
                start_offset=start,
                pop_time=changed.pop_time,
                invisible_time=changed.invisible_time,
                revive_queue=changed.revive_qid,
            ),
        )


def held(reply: Command) -> list[Held]:
    messages = list(decode_records(reply.body_bytes))
    handles = handles_of(reply.header(PopMessageResponse), "broker-a")
    assert [message.queue_offset for message in messages] == [handle.offset for handle in handles]
    return [Held(message, handle) for message, handle in zip(messages, handles, strict=True)]


@asynccontextmanager
async def popper_of(running: RunningBroker, topic: str = "orders", group: str = "poppers") -> AsyncIterator[Popper]:
    async with client_of(running) as client:
        yield Popper(client, topic, group)
