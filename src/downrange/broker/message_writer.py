"""The one way a message enters this broker, whoever sends it: store it, count it, wake who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from downrange.broker.held_pulls import HeldPulls
from downrange.broker.services.flushing import Flusher
from downrange.broker.statistics import Statistics
from downrange.clock import Clock
from downrange.model import properties as names
from downrange.model.hashing import tags_code
from downrange.model.message import TopicQueue
from downrange.model.properties import find_property
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.store.config import BrokerRole
from downrange.store.group_commit import FlushOutcome
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus
from downrange.transport.connection import LaterReply

_PUT_OK = PutMessageStatus.PUT_OK
_CODES = {
    PutMessageStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutMessageStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutMessageStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
    PutMessageStatus.MESSAGE_ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    PutMessageStatus.PROPERTIES_SIZE_EXCEEDED: ResponseCode.MESSAGE_ILLEGAL,
    PutMessageStatus.SERVICE_NOT_AVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
}


class MessageWriter:
    """Appends messages and makes the replies that depend on how safe they are.

    `on_delayed` is called with the queue of the delay topic that got a message, `on_appended` with the seconds that
    storing one took.
    """

    def __init__(
        self, store: MessageStore, held: HeldPulls, flusher: Flusher, statistics: Statistics, clock: Clock
    ) -> None:
        self._store = store
        self._held = held
        self._flusher = flusher
        self._clock = clock
        self.statistics = statistics
        # A master that promises a second copy has no slave to give it to, as long as there is no replication.
        is_sync_master = store.config.broker_role is BrokerRole.SYNC_MASTER
        self._replicated = PutMessageStatus.SLAVE_NOT_AVAILABLE if is_sync_master else _PUT_OK
        self._delays = store.config.delay_level_millis()
        self.max_delay_level = len(self._delays)
        self.on_delayed: Callable[[int], None] = lambda queue_id: None
        self.on_appended: Callable[[float], None] = lambda seconds: None

    def now(self) -> int:
        return self._clock.now()

    def append(self, message: NewMessage) -> AppendResult:
        start = perf_counter()
        result = self._store.append(message)
        self.on_appended(perf_counter() - start)
        if result.status is _PUT_OK:
            self.statistics.put(message.topic, 1, result.size)
            if self._held.is_waited_for(TopicQueue(message.topic, message.queue_id)):
                self._notify(message.topic, message.queue_id, result.queue_offset, message.properties)
            if message.topic == SCHEDULE_TOPIC:
                self.statistics.delayed(self._delays[message.queue_id] / 1000)
                self.on_delayed(message.queue_id)
        else:
            self.statistics.put_failed()
        return result

    def append_batch(self, message: NewMessage, units: Sequence[BatchUnit]) -> AppendResult:
        result = self._store.append_batch(message, units)
        if result.status is _PUT_OK:
            self.statistics.put(message.topic, len(units), result.size)
            if self._held.is_waited_for(TopicQueue(message.topic, message.queue_id)):
                for number, unit in enumerate(units):
                    self._notify(message.topic, message.queue_id, result.queue_offset + number, unit.properties)
        else:
            self.statistics.put_failed()
        return result

    def _notify(self, topic: str, queue_id: int, queue_offset: int, properties: bytes) -> None:
        text = properties.decode("utf-8", "replace")
        self._held.notify(topic, queue_id, queue_offset, tags_code(find_property(text, names.TAGS) or ""), text)

    def dispatched(self) -> None:
        """Records came into the log by another way (the transient pool): tell those who wait for them."""
        for grown in self._store.dispatch_pending():
            self._notify(grown.topic, grown.queue_id, grown.queue_offset, grown.properties)
            if grown.topic == SCHEDULE_TOPIC:
                self.on_delayed(grown.queue_id)

    def reply_when_safe(
        self, command: Command, result: AppendResult, waits: bool, accepted: Callable[[], SendMessageResponse]
    ) -> Command | LaterReply:
        """The reply to a send: at once, or when the message is as safe as this broker promises."""
        if result.status is not _PUT_OK or not waits:
            return self._reply(command, result, result.status, accepted())
        if not self._flusher.is_sync:
            return self._reply(command, result, self._replicated, accepted())
        later: LaterReply = asyncio.get_running_loop().create_future()
        outcome = self._flusher.wait_for(result.end_offset)
        outcome.add_done_callback(partial(self._reply_later, command, result, accepted, later))
        return later

    def _reply_later(
        self,
        command: Command,
        result: AppendResult,
        accepted: Callable[[], SendMessageResponse],
        later: LaterReply,
        outcome: asyncio.Future[FlushOutcome],
    ) -> None:
        if not later.done():
            is_safe = not outcome.cancelled() and outcome.result() is FlushOutcome.FLUSHED
            flushed = _PUT_OK if is_safe else PutMessageStatus.FLUSH_DISK_TIMEOUT
            status = flushed if self._replicated is _PUT_OK else self._replicated
            later.set_result(self._reply(command, result, status, accepted()))

    def _reply(
        self, command: Command, result: AppendResult, status: PutMessageStatus, header: SendMessageResponse
    ) -> Command:
        if status is _PUT_OK:
            return command.reply(header=header)
        code = _CODES.get(status, ResponseCode.SYSTEM_ERROR)
        if result.status is _PUT_OK:  # stored, but not as safe as wished
            return command.reply(code, header=header)
        regional = {"MSG_REGION": header.msg_region or "", "TRACE_ON": "true" if header.trace_on else "false"}
        return command.reply(code, self._remark(result), ext_fields=regional)

    def _remark(self, result: AppendResult) -> str:
        match result.status:
            case PutMessageStatus.MESSAGE_ILLEGAL | PutMessageStatus.PROPERTIES_SIZE_EXCEEDED:
                return (
                    "the message is illegal, maybe msg body or properties length not matched. msg body length limit "
                    f"{self._store.max_message_size}B, msg properties length limit 32KB."
                )
            case PutMessageStatus.SERVICE_NOT_AVAILABLE:
                return (
                    f"service not available now: {result.reason}. It may be caused by one of the following reasons: "
                    "the broker's disk is full "
                    f"[CL: {self._store.commit_log_disk_use:5.2f} CQ: {self._store.queue_disk_use:5.2f} "
                    f"INDEX: {self._store.queue_disk_use:5.2f}], messages are put to the slave, message store has been "
                    "shut down, etc."
                )
            case PutMessageStatus.CREATE_MAPEDFILE_FAILED:
                return "create mapped file failed, server is busy or broken."
            case PutMessageStatus.OS_PAGECACHE_BUSY:
                return "[PC_SYNCHRONIZED]broker busy, start flow control for a while"
            case _:
                return f"{result.status.value} {result.reason}".strip()
