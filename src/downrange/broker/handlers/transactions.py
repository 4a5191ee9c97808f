"""The end of a transaction (37), and another try for one that was given up (323)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from downrange.broker.flow_control import FlowControl
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.services.flushing import Flusher
from downrange.broker.transactions.half_messages import HalfMessages
from downrange.broker.transactions.records import committed, real_topic, resumed
from downrange.model import properties as names
from downrange.model.errors import MessageError
from downrange.model.message import SysFlag
from downrange.model.message_id import parse_offset_message_id
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC
from downrange.protocol.bodies.transactions import EndTransactionRequest, ResumeCheckHalfMessageRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, MessageIllegal, ServiceNotAvailable, SlaveNotAvailable
from downrange.store.config import BrokerRole
from downrange.store.group_commit import FlushOutcome
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import AppendResult, PutMessageStatus
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply

log = logging.getLogger(__name__)

_COMMIT: Final = int(SysFlag.TRANSACTION_COMMIT)
_ROLLBACK: Final = int(SysFlag.TRANSACTION_ROLLBACK)
_ILLEGAL: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class TransactionHandlers:
    """Ends transactions, once each. RocketMQ commits a second time when it is told twice; this broker does not."""

    def __init__(
        self,
        config: LiveConfig,
        half_messages: HalfMessages,
        writer: MessageWriter,
        flusher: Flusher,
        flow: FlowControl,
    ) -> None:
        self._config = config
        self._half_messages = half_messages
        self._writer = writer
        self._flusher = flusher
        self._flow = flow

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.END_TRANSACTION: self.end,
            RequestCode.RESUME_CHECK_HALF_MESSAGE: self.resume,
        }

    @property
    def answers_at_once(self) -> bool:
        """Whether the end of a transaction is answered when it is in the log, not only when it is on disk."""
        return not self._flusher.is_sync

    def end(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        """37. UNKNOWN gets no answer: the message waits on, and its check comes in time."""
        self._flow.check_end_transaction()
        header = command.header(EndTransactionRequest)
        if self._config.store.broker_role is BrokerRole.SLAVE:
            raise SlaveNotAvailable("a slave ends no transactions")
        if header.commit_or_rollback not in (_COMMIT, _ROLLBACK):
            return None
        half_message, half_offset = self.half_message(header)
        if header.commit_or_rollback == _COMMIT:
            result = self._commit(half_message, half_offset)
        else:
            result = self._half_messages.ended(half_offset, half_message.text, half_message.queue_offset)
            self._check_stored(result)
            self._writer.statistics.rolled_back(real_topic(half_message.text))
        return self._reply_when_safe(command, result)

    def resume(self, command: Command, connection: Connection) -> Command:
        """323: check a half message again that had been given up."""
        message_id = command.header(ResumeCheckHalfMessageRequest).msg_id or ""
        try:
            stored = self._half_messages.at(parse_offset_message_id(message_id).physical_offset)
        except MessageError as error:
            raise BrokerError(str(error)) from None
        if stored is None or stored.topic != CHECK_MAX_TIME_TOPIC:
            raise BrokerError(f"no message of {CHECK_MAX_TIME_TOPIC} has the id {message_id}")
        self._check_stored(self._writer.append(resumed(stored)))
        self._half_messages.stored(real_topic(stored.properties_text))
        log.info("half message checked again id=%s topic=%s", stored.message_id, real_topic(stored.properties_text))
        return command.reply()

    # --- checks -------------------------------------------------------------------------------------------------

    def half_message(self, header: EndTransactionRequest) -> tuple[KeptMessage, int]:
        """The half message whose transaction is to end, and where in the half queue it waits now."""
        found = self._half_messages.kept_at(header.commit_log_offset)
        if found is None or found.message.topic != HALF_TOPIC:
            raise BrokerError("Find prepared transaction message failed")
        if found.find(names.PGROUP) != header.producer_group:
            raise BrokerError("The producer group wrong")
        if found.queue_offset != header.tran_state_table_offset:
            raise BrokerError("The transaction state table offset wrong")
        if found.physical_offset != header.commit_log_offset:
            raise BrokerError("The commit log offset wrong")
        half_offset = self._half_messages.current(found.queue_offset)
        if half_offset is None:
            raise BrokerError("The transaction has ended, or a later copy of its message is being checked")
        return found, half_offset

    def _commit(self, half_message: KeptMessage, half_offset: int) -> AppendResult:
        message = committed(half_message)
        if message is None:
            raise BrokerError("the half message does not say where it belongs")
        result = self._writer.append(message)
        self._check_stored(result)
        self._writer.statistics.committed(message.topic)
        # Without this note the check asks again and the message comes twice; without the message it were lost.
        noted = self._half_messages.ended(half_offset, half_message.text, half_message.queue_offset)
        return noted if noted.status is PutMessageStatus.PUT_OK else result

    @staticmethod
    def _check_stored(result: AppendResult) -> None:
        if result.status is PutMessageStatus.PUT_OK:
            return
        if result.status in _ILLEGAL:
            raise MessageIllegal(f"the message is illegal: {result.reason}")
        if result.status is PutMessageStatus.SERVICE_NOT_AVAILABLE:
            raise ServiceNotAvailable(f"service not available now: {result.reason}")
        raise BrokerError(f"{result.status.value} {result.reason}".strip())

    # --- replies ------------------------------------------------------------------------------------------------

    def _reply_when_safe(self, command: Command, result: AppendResult) -> Command | LaterReply:
        """Who wants an answer gets it when the end is on disk, if this broker promises that for messages."""
        if command.is_oneway or self.answers_at_once:
            return command.reply()
        later: LaterReply = asyncio.get_running_loop().create_future()
        self._flusher.wait_for(result.end_offset).add_done_callback(partial(_flushed, command, later))
        return later


def _flushed(command: Command, later: LaterReply, outcome: asyncio.Future[FlushOutcome]) -> None:
    if not later.done():
        is_safe = not outcome.cancelled() and outcome.result() is FlushOutcome.FLUSHED
        later.set_result(command.reply() if is_safe else command.reply(ResponseCode.FLUSH_DISK_TIMEOUT))
