"""Replies to requests between clients: 324 and 325 come from the answering client, 326 goes to the asking one."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from downrange.broker.clients import Producers
from downrange.broker.handlers.send_reader import SendReader
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message_id import offset_message_id
from downrange.model.properties import decode_properties, encode_properties
from downrange.protocol.bodies.replies import PushReplyMessageRequest
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse, decode_send_v1
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError
from downrange.store.new_message import NewMessage, PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.errors import TransportError
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

PUSH_SECONDS: Final = 10.0
_REPLY_V1: Final = int(RequestCode.SEND_REPLY_MESSAGE)


@dataclass(eq=False)
class ReplyHandlers:
    """Hands a reply to the producer that waits for it, over the connection that producer opened.

    The answer says whether the producer has it. That the reply is stored as well changes nothing about that.
    """

    _reader: SendReader
    _writer: MessageWriter
    _producers: Producers

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.reply,
            RequestCode.SEND_REPLY_MESSAGE_V2: self.reply,
        }

    def reply(self, command: Command, connection: Connection) -> Command | LaterReply:
        """324 and 325."""
        v1 = command.code == _REPLY_V1
        header = decode_send_v1(command.ext_fields) if v1 else command.header(SendMessageRequest)
        try:
            self._reader.check_started()
            queue_id = self._reader.queue_id(self._reader.topic(header), header.queue_id, connection)
        except (BrokerError, MessageError) as error:
            return self._reader.refusal(command, error)
        properties = header.properties.encode()
        message = self._reader.message(header, queue_id, command.body_bytes, properties, connection)
        return asyncio.ensure_future(self._push_and_store(command, header, message, connection.peer))

    async def _push_and_store(
        self, command: Command, header: SendMessageRequest, message: NewMessage, born_host: str
    ) -> Command | None:
        problem = await self._push(header, message, born_host)
        accepted = self._store(message) if self._reader.config.broker.store_reply_message_enable else None
        if problem is not None:
            log.warning("reply not delivered topic=%s reason=%s", header.topic, problem)
            refused = self._reader.refusal(command, BrokerError(problem))
            if accepted is None:
                return refused
            return command.reply(refused.code, problem, header=accepted)
        return command.reply(header=accepted or self._accepted("0", message.queue_id, 0))

    async def _push(self, header: SendMessageRequest, message: NewMessage, born_host: str) -> str | None:
        """Give the reply to the client its request came from; why that failed, if it did."""
        properties = decode_properties(header.properties)
        client_id = properties.get(names.REPLY_TO_CLIENT)
        if client_id is None:
            return f"reply message properties[{names.REPLY_TO_CLIENT}] is null"
        client = self._producers.find(client_id)
        if client is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now = self._writer.now()
        push = PushReplyMessageRequest(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=encode_properties({**properties, names.PUSH_REPLY_TIME: str(now)}),
            reconsume_times=header.reconsume_times,
            unit_mode=header.unit_mode,
            born_host=born_host,
            store_host=self._reader.config.broker.address,
            store_timestamp=now,
        )
        command = request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, push, body=message.body)
        try:
            taken = await client.connection.request(command, PUSH_SECONDS)
        except TransportError as error:
            log.info("reply not pushed client=%s reason=%s", client_id, error)
        else:
            if taken.code == ResponseCode.SUCCESS:
                return None
            log.info("reply not taken client=%s code=%d remark=%s", client_id, taken.code, taken.remark)
        return f"push reply message to {client_id}fail."

    def _store(self, message: NewMessage) -> SendMessageResponse | None:
        result = self._writer.append_one(message)
        if result.status is not PutMessageStatus.PUT_OK:
            log.warning("reply not stored topic=%s status=%s", message.topic, result.status.value)
            return None
        message_id = offset_message_id(message.store_host, result.physical_offset)
        return self._accepted(message_id, message.queue_id, result.queue_offset)

    def _accepted(self, message_id: str, queue_id: int, queue_offset: int) -> SendMessageResponse:
        broker = self._reader.config.broker
        return SendMessageResponse(
            msg_id=message_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            msg_region=broker.region_id,
            trace_on=broker.trace_on,
        )
