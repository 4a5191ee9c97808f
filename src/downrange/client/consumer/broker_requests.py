"""Requests of brokers to a client's consumers, handed to the consumer of the group: 40, 220, 221, 307, 309."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol

from downrange.client.errors import ClientError
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.protocol.bodies.consumers import (
    ConsumeMessageDirectlyRequest,
    ConsumeMessageDirectlyResult,
    ConsumerRunningInfo,
    ConsumerStatus,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    QueueOffsetList,
    QueueOffsets,
    ResetOffsetRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply


class GroupMember(Protocol):
    """A consumer as brokers may address it."""

    def members_changed(self) -> None:
        """A member joined or left the group."""
        ...

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on from these offsets, as far as the queues are ours."""
        ...

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        """How far we are with the queues of a topic."""
        ...

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo: ...

    def consume_directly(self, record: bytes, broker_name: str) -> Coroutine[Any, Any, ConsumeMessageDirectlyResult]:
        """Hand one stored record to the callback."""
        ...


def join(session: Session, group: str, member: GroupMember) -> None:
    """Answer requests for this group from now on. One client can be in a group only once."""
    if group in session.members:
        raise ClientError(f"this session has a consumer of the group {group} already; give the second one its own")
    session.members[group] = member
    for code, handle in _HANDLERS.items():
        session.handlers[code] = partial(handle, session)


def leave(session: Session, group: str) -> None:
    session.members.pop(group, None)


def _member(session: Session, group: str) -> GroupMember:
    member = session.members.get(group)
    if member is None:
        raise BrokerError(f"The consumer group <{group}> not exist in the consumer")
    return member


def _members_changed(session: Session, command: Command, connection: Connection) -> None:
    # Java's clients rebalance all their groups, whichever the notice names.
    for member in session.members.values():
        member.members_changed()


def _reset_offsets(session: Session, command: Command, connection: Connection) -> None:
    header = command.header(ResetOffsetRequest)
    _member(session, header.group).reset_offsets(header.topic, _offsets(command.body_bytes))


def _offsets(body: bytes) -> Mapping[MessageQueue, int]:
    try:
        return decode_body(QueueOffsets, body).offset_table
    except BodyError:
        rows = decode_body(QueueOffsetList, body).offset_table
        return {MessageQueue(row.topic, row.broker_name, row.queue_id): row.offset for row in rows}


def _consumer_status(session: Session, command: Command, connection: Connection) -> Command:
    header = command.header(GetConsumerStatusRequest)
    offsets = _member(session, header.group).consumer_status(header.topic)
    return command.reply(body=encode_body(ConsumerStatus(message_queue_table=dict(offsets))))


def _running_info(session: Session, command: Command, connection: Connection) -> Command:
    header = command.header(GetConsumerRunningInfoRequest)
    info = _member(session, header.consumer_group).running_info(with_stacks=header.jstack_enable)
    return command.reply(body=encode_body(info))


def _consume_directly(session: Session, command: Command, connection: Connection) -> LaterReply:
    header = command.header(ConsumeMessageDirectlyRequest)
    member = _member(session, header.consumer_group)

    async def consume() -> Command | None:
        result = await member.consume_directly(command.body_bytes, header.broker_name or "")
        return command.reply(body=encode_body(result))

    return asyncio.ensure_future(consume())


_HANDLERS: Final[Mapping[int, Callable[[Session, Command, Connection], Command | LaterReply | None]]] = {
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: _members_changed,
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: _reset_offsets,
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: _consumer_status,
    RequestCode.GET_CONSUMER_RUNNING_INFO: _running_info,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: _consume_directly,
}
