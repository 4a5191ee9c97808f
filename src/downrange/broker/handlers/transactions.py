"""The end of a transaction (37), and another try for one that was given up (323)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from downrange.broker.handlers.storing import Storing
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.services.flushing import Flusher
from downrange.broker.timed import Timing
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
from downrange.protocol.errors import BrokerError, SlaveNotAvailable
from downrange.store.config import BrokerRole
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import PutMessageStatus, Refusal
from downrange.store.new_messages import Place
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

_COMMIT: Final = int(SysFlag.TRANSACTION_COMMIT)
_ROLLBACK: Final = int(SysFlag.TRANSACTION_ROLLBACK)
_ILLEGAL: Final = (PutMessageStatus.MESSAGE_ILLEGAL, PutMessageStatus.PROPERTIES_SIZE_EXCEEDED)


class TransactionHandlers:
    """Ends transactions, once each. RocketMQ commits a second time when it is told twice; this broker does not."""

    def __init__(
        self, config: LiveConfig, half_messages: HalfMessages, writer: MessageWriter, flusher: Flusher, timing: Timing
    ) -> None:
        self._config = config
        self._half_messages = half_messages
        self._writer = writer
        self._flusher = flusher
        self._timing = timing

    @property
    def routes(self) -> RouteTable:
        return {RequestCode.RESUME_CHECK_HALF_MESSAGE: self.resume}

    def read_end(self, command: Command, origin: Connection) -> Storing | None:
        """37. UNKNOWN gets no answer: the message waits on, and its check comes in time.

        Stored are the message of a commit and, behind it, the notes that its half message has ended. Without the notes
        the check would ask again and the message come twice; without the message it would be lost.
        """
        header = command.header(EndTransactionRequest)
        if self._config.store.broker_role is BrokerRole.SLAVE:
            raise SlaveNotAvailable("a slave ends no transactions")
        if header.commit_or_rollback not in (_COMMIT, _ROLLBACK):
            return None
        half_message, half_offset = self._half_message(header)
        half_messages, now = self._half_messages, self._writer.now()
        ended = half_messages.ended_with(half_offset, half_message.text, half_message.queue_offset)
        group = [half_messages.operation(offset, now) for offset in ended]
        topic = real_topic(half_message.text)
        statistics = self._writer.statistics
        if header.commit_or_rollback == _COMMIT:
            message = committed(half_message)
            if message is None:
                raise BrokerError("the half message does not say where it belongs")
            if "TIMER_D" in half_message.text:
                self._timing.set_aside(message, half_message.properties, now)
            group.insert(0, message)
            count = statistics.committed
        else:
            count = statistics.rolled_back

        def stored(places: Sequence[Place]) -> None:
            half_messages.noted(ended, topic, [place[0] + place[1] for place in places[-len(ended) :]])
            count(topic)

        # The end is answered when it is on disk, if this broker promises that for messages; slaves are not waited for.
        waits = self._flusher.is_sync
        return Storing(group, self._refused, waits=waits, reply=command.reply(), then=stored, key=half_offset)

    def resume(self, command: Command, connection: Connection) -> Command:
        """323: check a half message again that had been given up."""
        message_id = command.header(ResumeCheckHalfMessageRequest).msg_id or ""
        try:
            stored = self._half_messages.at(parse_offset_message_id(message_id).physical_offset)
        except MessageError as error:
            raise BrokerError(str(error)) from None
        if stored is None or stored.topic != CHECK_MAX_TIME_TOPIC:
            raise BrokerError(f"no message of {CHECK_MAX_TIME_TOPIC} has the id {message_id}")
        result = self._writer.append_one(resumed(stored))
        if result.status is not PutMessageStatus.PUT_OK:
            return self._refused(command, Refusal(result.status, result.reason))
        self._half_messages.stored(real_topic(stored.properties_text))
        log.info("half message checked again id=%s topic=%s", stored.message_id, real_topic(stored.properties_text))
        return command.reply()

    # --- checks -------------------------------------------------------------------------------------------------

    def _half_message(self, header: EndTransactionRequest) -> tuple[KeptMessage, int]:
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
        if not self._half_messages.is_at(found.queue_offset, header.commit_log_offset):  # bytes inside a message's body
            raise BrokerError("Find prepared transaction message failed")
        half_offset = self._half_messages.current(found.queue_offset)
        if half_offset is None:
            raise BrokerError("The transaction has ended, or a later copy of its message is being checked")
        return found, half_offset

    @staticmethod
    def _refused(command: Command, refusal: Refusal) -> Command:
        if refusal.status in _ILLEGAL:
            return command.reply(ResponseCode.MESSAGE_ILLEGAL, f"the message is illegal: {refusal.reason}")
        if refusal.status is PutMessageStatus.SERVICE_NOT_AVAILABLE:
            return command.reply(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {refusal.reason}")
        return command.reply(ResponseCode.SYSTEM_ERROR, f"{refusal.status.value} {refusal.reason}".strip())
