"""Requests of operators to running consumers, relayed over the connection that the consumer opened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from downrange.broker.clients import Client
from downrange.broker.handlers.query import record_at
from downrange.broker.live_config import LiveConfig
from downrange.broker.routes import RouteTable
from downrange.broker.tables import Tables
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.message_id import parse_offset_message_id
from downrange.protocol.bodies.body import decode_body, encode_java_body
from downrange.protocol.bodies.consumers import (
    ConsumeMessageDirectlyRequest,
    ConsumerStatus,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
    QueueOffset,
    QueueOffsetList,
    QueueOffsets,
    ResetOffsetRequest,
)
from downrange.protocol.codes import LanguageCode, RequestCode, version_name
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, ConsumeMessageTimeout, ConsumerNotOnline
from downrange.protocol.signing import without_signature
from downrange.store.message_store import MessageStore
from downrange.transport.connection import Connection
from downrange.transport.errors import RequestTimedOut, TransportError
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

RELAY_SECONDS: Final = 10.0
STATUS_SECONDS: Final = 5.0
# The oldest versions of consumers that understand these requests: 3.0.7-SNAPSHOT and 3.1.8-SNAPSHOT.
_OLDEST_FOR_OFFSETS: Final = 28
_OLDEST_FOR_RELAY: Final = 62
_END_OF_QUEUE: Final = -1
_ALL_QUEUES: Final = -1


@dataclass(eq=False)
class ConsumerHandlers:
    """Asks consumers on behalf of operators. Bodies with queues as keys are written in Java's form, the only one
    that clients in other languages read.
    """

    _config: LiveConfig
    _tables: Tables
    _store: MessageStore

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.GET_CONSUMER_RUNNING_INFO: self.get_running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: self.reset_offsets,
            RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.get_status,
        }

    # --- relaying -----------------------------------------------------------------------------------------------

    def get_running_info(self, command: Command, connection: Connection) -> LaterReply:
        """Request 307: relay the state that one consumer reports."""
        header = command.header(GetConsumerRunningInfoRequest)
        client = self._find(header.consumer_group, header.client_id)
        relayed = request(command.code, ext_fields=without_signature(command.ext_fields), body=command.body)
        return asyncio.ensure_future(_relay(command, relayed, client, header.consumer_group))

    def consume_directly(self, command: Command, connection: Connection) -> LaterReply:
        """Request 309: hand one stored message to the listener of one consumer."""
        header = command.header(ConsumeMessageDirectlyRequest)
        client = self._find(header.consumer_group, header.client_id)
        if header.msg_id is None:
            raise BrokerError("missing required field 'msgId'")
        record = record_at(self._store, parse_offset_message_id(header.msg_id).physical_offset)
        fields = {**without_signature(command.ext_fields), "brokerName": self._config.broker.broker_name}
        relayed = request(command.code, ext_fields=fields, body=record)
        return asyncio.ensure_future(_relay(command, relayed, client, header.consumer_group))

    def _find(self, group: str, client_id: str | None) -> Client:
        live = self._tables.consumers.get(group)
        client = live.find(client_id) if live is not None and client_id is not None else None
        if client is None:
            raise BrokerError(f"The Consumer <{group}> <{client_id}> not online")
        if client.version < _OLDEST_FOR_RELAY:
            raise BrokerError(
                f"The Consumer <{client_id}> Version <{version_name(client.version)}> too low to finish, "
                "please upgrade it to V3_1_8_SNAPSHOT"
            )
        return client

    # --- offsets ------------------------------------------------------------------------------------------------

    def reset_offsets(self, command: Command, connection: Connection) -> Command:
        """Request 222: tell every consumer of a group its new offsets; they set and commit them themselves."""
        header = command.header(ResetOffsetRequest)
        table = self._new_offsets(header)
        members = self._members(header.group)
        if not members:
            raise ConsumerNotOnline(
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}"
            )
        _refuse_old(members)
        is_list = command.language == LanguageCode.CPP
        order = request(
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET,
            # The offsets are final already: consumers set them whether this is forced or not.
            ResetOffsetRequest(topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=False),
            body=encode_java_body(_as_list(table) if is_list else QueueOffsets(table)),
            oneway=True,
        )
        for client in members:
            try:
                client.connection.oneway(order)
            except TransportError as error:
                log.warning("cannot reset offsets client=%s reason=%s", client.client_id, error)
        log.info("offsets reset group=%s topic=%s timestamp=%d", header.group, header.topic, header.timestamp)
        return command.reply(body=encode_java_body(QueueOffsets(table)))

    def _new_offsets(self, header: ResetOffsetRequest) -> dict[MessageQueue, int]:
        config = self._tables.topics.get(header.topic)
        if config is None:
            raise BrokerError(f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}")
        queues: Iterable[int] = range(config.write_queue_nums)
        if header.queue_id is not None and header.queue_id != _ALL_QUEUES:
            if header.queue_id not in queues:
                raise BrokerError(f"[reset-offset] topic[{header.topic}] has no queue {header.queue_id}")
            queues = [header.queue_id]
        broker_name = self._config.broker.broker_name
        return {
            MessageQueue(header.topic, broker_name, queue_id): self._new_offset(header, queue_id) for queue_id in queues
        }

    def _new_offset(self, header: ResetOffsetRequest, queue_id: int) -> int:
        """The new offset of a group in one queue; without force it may only move backwards."""
        committed = self._tables.offsets.get(header.topic, header.group, queue_id)
        if committed is None:
            raise BrokerError(f"THe consumer group <{header.group}> not exist")
        if header.queue_id == queue_id and header.offset is not None and header.offset >= 0:
            wanted = header.offset
        elif header.timestamp == _END_OF_QUEUE:
            wanted = self._store.max_offset_of(header.topic, queue_id)
        else:
            wanted = max(0, self._store.offset_by_time(header.topic, queue_id, header.timestamp))
        return wanted if header.is_force else min(wanted, committed)

    def get_status(self, command: Command, connection: Connection) -> LaterReply:
        """Request 223: the offsets in the memory of one consumer, or of all consumers of a group."""
        header = command.header(GetConsumerStatusRequest)
        members = self._members(header.group)
        if not members:
            raise BrokerError(f"No Any Consumer online in the consumer group: [{header.group}]")
        _refuse_old(members)
        asked = [client for client in members if not header.client_addr or client.client_id == header.client_addr]
        return asyncio.ensure_future(_gather_status(command, header, asked))

    def _members(self, group: str) -> list[Client]:
        live = self._tables.consumers.get(group)
        return [] if live is None else list(live.members.values())


def _refuse_old(members: list[Client]) -> None:
    oldest = min(client.version for client in members)
    if oldest < _OLDEST_FOR_OFFSETS:
        raise BrokerError(f"the client does not support this feature. version={version_name(oldest)}")


def _as_list(table: dict[MessageQueue, int]) -> QueueOffsetList:
    return QueueOffsetList(
        tuple(
            QueueOffset(topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset)
            for queue, offset in table.items()
        )
    )


async def _relay(command: Command, relayed: Command, client: Client, group: str) -> Command | None:
    """Pass a request on to the consumer and return its answer."""
    who = f"<{group}> <{client.client_id}>"
    try:
        reply = await client.connection.request(relayed, RELAY_SECONDS)
    except RequestTimedOut as error:
        raise ConsumeMessageTimeout(f"consumer {who} Timeout: {error}") from None
    except TransportError as error:
        raise BrokerError(f"invoke consumer {who} Exception: {error}") from None
    fields = None if reply.raw_ext is None else reply.ext_fields
    return command.reply(reply.code, reply.remark, ext_fields=fields, body=reply.body)


async def _gather_status(command: Command, header: GetConsumerStatusRequest, asked: list[Client]) -> Command | None:
    question = request(
        RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, GetConsumerStatusRequest(topic=header.topic, group=header.group)
    )
    tables = await asyncio.gather(*(_ask_status(client, question) for client in asked))
    known = {client.client_id: table for client, table in zip(asked, tables, strict=True) if table is not None}
    return command.reply(body=encode_java_body(ConsumerStatus(consumer_table=known)))


async def _ask_status(client: Client, question: Command) -> dict[MessageQueue, int] | None:
    """The offsets that one consumer reports; None when it does not answer: the other consumers are still shown."""
    try:
        reply = await client.connection.request(question, STATUS_SECONDS)
        if reply.code == 0 and reply.body:
            return decode_body(ConsumerStatus, reply.body_bytes).message_queue_table
        log.warning("no consumer status client=%s code=%d remark=%s", client.client_id, reply.code, reply.remark)
    except MQError as error:
        log.warning("no consumer status client=%s reason=%s", client.client_id, error)
    return None
