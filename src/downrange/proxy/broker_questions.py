"""Requests of brokers to the clients behind us: 39 about half messages, 307 and 309 of operators to consumers."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.record import decode_record
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.consumers import (
    ConsumeMessageDirectlyRequest,
    ConsumeMessageDirectlyResult,
    ConsumeResult,
    ConsumerRunningInfo,
    GetConsumerRunningInfoRequest,
)
from downrange.protocol.bodies.transactions import CheckTransactionStateRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, ConsumerNotOnline, SystemBusy
from downrange.proxy.backend import HalfMessage
from downrange.proxy.clients import Client, Clients, consumer_data
from downrange.proxy.conversion import to_message
from downrange.proxy.sending import Transactions
from downrange.proxy.wire.enums import Code
from downrange.proxy.wire.messages import TelemetryCommand
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

_SECONDS: Final = 5.0
_RESULTS: Final = {
    Code.OK: ConsumeResult.SUCCESS,
    Code.FAILED_TO_CONSUME_MESSAGE: ConsumeResult.LATER,
    Code.MESSAGE_CORRUPTED: ConsumeResult.RETURN_NULL,
}


class BrokerQuestions:
    """Hands requests of brokers on to gRPC clients."""

    def __init__(self, session: Session, clients: Clients, transactions: Transactions) -> None:
        self._clients = clients
        self._transactions = transactions
        session.handlers[RequestCode.CHECK_TRANSACTION_STATE] = self.check_transaction
        session.handlers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = self.consume_directly
        session.handlers[RequestCode.GET_CONSUMER_RUNNING_INFO] = self.running_info
        session.handlers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = lambda command, connection: None

    def check_transaction(self, command: Command, connection: Connection) -> None:
        """Request 39: ask a producer of the topic; its answer is an EndTransaction call."""
        try:
            header = command.header(CheckTransactionStateRequest)
            record = decode_record(command.body_bytes)
        except MQError as error:
            log.warning("question about a transaction cannot be read reason=%s", error)
            return
        properties = record.properties
        topic = properties.get(names.PGROUP, record.topic)  # the producer group of gRPC clients is the topic
        transaction_id = properties.get(names.UNIQ_KEY) or header.transaction_id or record.message_id
        broker_name = header.bname or ""
        question = TelemetryCommand()
        question.recover_orphaned_transaction_command.message.CopyFrom(to_message(record, topic))
        question.recover_orphaned_transaction_command.transaction_id = transaction_id
        half = HalfMessage(broker_name, header.tran_state_table_offset, header.commit_log_offset)
        for client in self._clients.producers_of(topic):
            known = self._transactions.get(topic, transaction_id)
            if known is not None and not broker_name:
                half = half._replace(broker_name=known.half.broker_name)
            self._transactions.begun(topic, transaction_id, half)
            if client.tell(question):
                return
        log.info("no producer to ask about a transaction topic=%s id=%s", topic, transaction_id)

    def consume_directly(self, command: Command, connection: Connection) -> LaterReply:
        """Request 309: hand one message to the listener of a consumer."""
        header = command.header(ConsumeMessageDirectlyRequest)
        client = self._consumer(header.consumer_group, header.client_id)
        record = decode_record(command.body_bytes)

        async def reply() -> Command | None:
            question = TelemetryCommand()
            question.verify_message_command.message.CopyFrom(to_message(record, header.topic or record.topic))
            began = time.monotonic()
            answer = await self._ask(client, question)
            code = answer.status.code
            result = _RESULTS.get(Code(code), ConsumeResult.THROW_EXCEPTION) if code in _CODES else None
            body = ConsumeMessageDirectlyResult(
                consume_result=result or ConsumeResult.THROW_EXCEPTION,
                remark="from gRPC client",
                spent_time_mills=int((time.monotonic() - began) * 1000),
            )
            return command.reply(body=encode_body(body))

        return asyncio.ensure_future(reply())

    def running_info(self, command: Command, connection: Connection) -> LaterReply:
        """Request 307: the state of a consumer, as far as a gRPC client tells it: the stacks of its threads."""
        header = command.header(GetConsumerRunningInfoRequest)
        client = self._consumer(header.consumer_group, header.client_id)

        async def reply() -> Command | None:
            stacks = None
            if header.jstack_enable:
                question = TelemetryCommand()
                question.print_thread_stack_trace_command.nonce = ""
                stacks = (await self._ask(client, question)).thread_stack_trace.thread_stack_trace
            data = consumer_data(client.settings)
            info = ConsumerRunningInfo(
                properties={"PROP_CONSUME_TYPE": data.consume_type, "PROP_CONSUMER_START_TIMESTAMP": "0"},
                subscription_set=data.subscription_data_set,
                jstack=stacks,
            )
            return command.reply(body=encode_body(info))

        return asyncio.ensure_future(reply())

    def _consumer(self, group: str, client_id: str | None) -> Client:
        found = [client for client in self._clients.consumers_of(group) if client.streams]
        named = [client for client in found if client.client_id == client_id]
        if not found:
            raise ConsumerNotOnline(f"the group {group} has no gRPC client here")
        return (named or found)[0]

    async def _ask(self, client: Client, question: TelemetryCommand) -> TelemetryCommand:
        try:
            answer = await self._clients.ask(client, question, _SECONDS)
        except TimeoutError:
            raise SystemBusy("call remote timeout") from None
        if answer is None:
            raise BrokerError(f"the client {client.client_id} has no telemetry stream")
        return answer


_CODES: Final = frozenset(map(int, Code))
