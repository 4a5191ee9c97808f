"""Recalls of timer messages (370), and the progress of timer messages for slaves (60, 61). [RecallMessageProcessor]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from downrange.broker.handlers.storing import Storing
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.routes import RouteTable
from downrange.broker.services.timer import TimerService
from downrange.broker.timed import Timing
from downrange.broker.topics import Topics
from downrange.model import properties as names
from downrange.model.message_id import pack_host
from downrange.model.recall_handle import RecallHandle
from downrange.model.topics import Perm
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.timer import RecallMessageRequest, RecallMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError, NoPermission, SlaveNotAvailable, TopicNotExist
from downrange.store.config import BrokerRole
from downrange.store.new_message import NewMessage, Refusal
from downrange.transport.connection import Connection

_TAG: Final = "_RECALL_TAG_"
_AWAY: Final = "recall failed, broker service not available"


@dataclass(eq=False)
class RecallReader:
    """Makes deletions of recalls: a message of the timer topic that is due in the tick of the one it deletes."""

    _config: LiveConfig
    _topics: Topics
    _writer: MessageWriter
    _timing: Timing

    def read(self, command: Command, origin: Connection) -> Storing | Command:
        """370. Whether the message exists, or was recalled before, is not looked at."""
        header = command.header(RecallMessageRequest)
        try:
            handle = self.checked(header.topic, header.recall_handle)
            message = self.deletion(handle, header.producer_group, origin.peer_host)
        except BrokerError as error:
            return command.reply(error.code, error.remark, ext_fields=self._region())
        response = RecallMessageResponse(msg_id=handle.message_id, msg_region=self._config.broker.region_id)
        return Storing((message,), self._refused, reply=command.reply(header=response))

    def checked(self, topic: str, text: str) -> RecallHandle:
        """The parts of a handle that names a message of this topic and broker; raises BrokerError for any other."""
        broker, now = self._config.broker, self._writer.now()
        if not broker.recall_message_enable:
            raise NoPermission("recall failed, operation is forbidden")
        if self._config.store.broker_role is BrokerRole.SLAVE:
            raise SlaveNotAvailable(_AWAY)
        is_writable = bool(broker.broker_permission & Perm.WRITE) or broker.allow_recall_when_broker_not_writeable
        if now < broker.start_accept_send_request_time_stamp or not is_writable:
            raise BrokerError(_AWAY, ResponseCode.SERVICE_NOT_AVAILABLE)
        if topic not in self._topics:
            raise TopicNotExist(f"recall failed, the topic[{topic}] not exist")
        handle = RecallHandle.decode(text)
        if handle is None:
            raise BrokerError("recall handle is invalid", ResponseCode.ILLEGAL_OPERATION)
        if handle.topic != topic:
            raise BrokerError("recall failed, topic not match", ResponseCode.ILLEGAL_OPERATION)
        if handle.broker_name != broker.broker_name:
            raise BrokerError(_AWAY, ResponseCode.ILLEGAL_OPERATION)
        if not now < handle.time < now + self._config.store.timer_max_delay_sec * 1000:
            raise BrokerError("recall failed, timestamp invalid", ResponseCode.ILLEGAL_OPERATION)
        return handle

    def deletion(self, handle: RecallHandle, producer_group: str | None, born_host: bytes) -> NewMessage:
        """The message that deletes the one of a handle; raises BrokerError when timer messages are not taken."""
        broker, now = self._config.broker, self._writer.now()
        properties = {
            names.TAGS: _TAG,
            names.TIMER_DEL_UNIQKEY: f"{handle.topic}+{handle.message_id}",
            names.UNIQ_KEY: handle.message_id,
            names.TIMER_DELIVER_MS: str(handle.time),
            names.BORN_TIMESTAMP: str(now),
            names.PGROUP: producer_group or "",
        }
        store_host = pack_host(broker.broker_ip1, broker.listen_port)
        message = NewMessage(handle.topic, 0, b"0", b"", now, born_host, store_host)
        self._timing.set_aside(message, properties, now)
        return message

    def _refused(self, command: Command, refusal: Refusal) -> Command:
        return command.reply(ResponseCode.SYSTEM_ERROR, "recall failed, execute error", ext_fields=self._region())

    def _region(self) -> dict[str, str]:
        return {"MSG_REGION": self._config.broker.region_id}


@dataclass(eq=False)
class TimerHandlers:
    """Tells slaves how far their master is with timer messages."""

    _timer: TimerService

    @property
    def routes(self) -> RouteTable:
        return {
            RequestCode.GET_TIMER_CHECK_POINT: self.get_checkpoint,
            RequestCode.GET_TIMER_METRICS: self.get_metrics,
        }

    def get_checkpoint(self, command: Command, connection: Connection) -> Command:
        """60: the checkpoint, as seven longs."""
        return command.reply(body=self._timer.checkpoint().encoded)

    def get_metrics(self, command: Command, connection: Connection) -> Command:
        """61: how many timer messages wait."""
        return command.reply(body=encode_body(self._timer.metrics.table()))
