"""The one way a message enters this broker, whoever sends it: store it, count it, wake who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from time import perf_counter

from downrange.broker.replication.master import Slaves
from downrange.broker.replication.waiting import Tell
from downrange.broker.services.flushing import Flusher
from downrange.broker.statistics import LARGE, Statistics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import Clock
from downrange.model.message import TopicQueue
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.protocol.bodies.send import SendMessageResponse
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command
from downrange.store.config import BrokerRole
from downrange.store.group_commit import FlushOutcome
from downrange.store.growth import Growth
from downrange.store.message_store import MessageStore
from downrange.store.new_message import AppendResult, BatchUnit, NewMessage, PutMessageStatus
from downrange.store.queue.queues import QueueState
from downrange.store.run import Place, Run
from downrange.transport.handler import LaterReply

_PUT_OK = PutMessageStatus.PUT_OK
STATUS_CODES = {
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
        self,
        store: MessageStore,
        pulls: WaitingPulls,
        flusher: Flusher,
        statistics: Statistics,
        clock: Clock,
        slaves: Slaves | None = None,
    ) -> None:
        self._store = store
        self._pulls = pulls
        self._notify = pulls.notify
        self._waiting = pulls.queues  # empty: there is nobody to wake
        self._flusher = flusher
        self._clock = clock
        self.statistics = statistics
        statistics.take_plain_puts = store.queues.take_counts
        self._slaves = slaves
        self._links: Collection[object] = () if slaves is None else slaves.links  # empty: there is nobody to wake
        # Who a sender waits for beside the disk.
        self._copied_by = slaves if store.config.broker_role is BrokerRole.SYNC_MASTER else None
        self.makes_wait = self._copied_by is not None or flusher.is_sync
        """Whether senders wait until their messages are as safe as promised, or are answered at once."""
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
            self._tell(message, result.queue_offset)
            if self._links:
                self._wake_slaves()
        else:
            self.statistics.put_failed()
        return result

    def append_together(self, messages: Sequence[NewMessage]) -> list[Place] | None:
        """`append` for several messages, all or none; None when they have to go one by one."""
        start = perf_counter()
        places = self._store.append_together(messages, self._clock.now())
        if places is None:
            return None
        self.on_appended(perf_counter() - start)
        self.statistics.plain_puts += len(places)
        for message, (_, size, queue_offset) in zip(messages, places, strict=True):
            if size > LARGE:
                self.statistics.put_large(message.topic, size)
            self._tell(message, queue_offset)
        if self._links:
            self._wake_slaves()
        return places

    def _tell(self, message: NewMessage, queue_offset: int) -> None:
        """A message was stored: wake who waits for it."""
        topic = message.topic
        if self._waiting and (topic, message.queue_id) in self._waiting:
            self._notify(topic, message.queue_id, queue_offset, message.properties)
        if topic == SCHEDULE_TOPIC:
            self.statistics.delayed(self._delays[message.queue_id] / 1000)
            self.on_delayed(message.queue_id)

    @property
    def store(self) -> MessageStore:
        return self._store

    def append_run(self, run: Run, born_host: bytes | list[bytes], store_host: bytes) -> bool:
        """`append` for many plain messages at once; False when they have to go one by one."""
        if not self._store.append_run(run, born_host, store_host, self._clock.now()):
            return False
        if run.requests < len(run):
            self._count_batches(run)
        else:
            self.statistics.plain_puts += len(run)
            if run.largest > LARGE:
                for state, (_, size, _) in zip(run.states, run.places, strict=True):
                    if size > LARGE:
                        self.statistics.put_large(state.topic, size)
        if self._waiting:
            self._wake_waiting(run)
        if self._links:
            self._wake_slaves()
        return True

    def _count_batches(self, run: Run) -> None:
        states, places = run.states, run.places
        at = 0
        for *_, count in run.sends:
            size = sum([place[1] for place in places[at : at + count]])
            states[at].uncount(count, size)
            self.statistics.put(states[at].topic, count, size)
            at += count

    def _wake_waiting(self, run: Run) -> None:
        states = run.states
        for state in dict.fromkeys(states):
            if (state.topic, state.queue_id) in self._waiting:
                self._pulls.notify_batch(
                    state.topic, state.queue_id, state.next_offset - 1, partial(_properties_of, run, state)
                )

    def tell_when_safe(self, end_offset: int, tell: Tell) -> None:
        """Tell when the log up to here is as safe as this broker promises, or will not be; that may be at once.

        For those who have to wait (`makes_wait`). `tell` must not raise.
        """
        slaves, flusher = self._copied_by, self._flusher
        if slaves is None:
            flusher.tell_when_flushed(end_offset, partial(_tell_flushed, tell))
        elif not flusher.is_sync:
            slaves.tell_when_copied(end_offset, tell)
        else:
            both = DiskAndSlave(tell)
            flusher.tell_when_flushed(end_offset, both.flushed, may_block=False)  # the slave is at it meanwhile
            slaves.tell_when_copied(end_offset, both.copied)

    def append_batch(self, message: NewMessage, units: Sequence[BatchUnit]) -> AppendResult:
        result = self._store.append_batch(message, units)
        if result.status is _PUT_OK:
            self.statistics.put(message.topic, len(units), result.size)
            if self._links:
                self._wake_slaves()
            if self._pulls.is_waited_for(TopicQueue(message.topic, message.queue_id)):
                for number, unit in enumerate(units):
                    self._notify(message.topic, message.queue_id, result.queue_offset + number, unit.properties)
        else:
            self.statistics.put_failed()
        return result

    def _wake_slaves(self) -> None:
        if self._slaves is not None:
            self._slaves.wake()

    def dispatched(self) -> Growth:
        """Records came into the log by another way (transient pool, master): tell who waits for them; return them."""
        growth = self._store.dispatch_pending(self._waiting)
        for grown in growth.watched_messages:
            self._notify(grown.topic, grown.queue_id, grown.queue_offset, grown.properties)
        for topic, queue_id in growth.sizes:
            if topic == SCHEDULE_TOPIC:
                self.on_delayed(queue_id)
        if self._links:
            self._wake_slaves()
        return growth

    def reply_when_safe(
        self, command: Command, result: AppendResult, waits: bool, accepted: Callable[[], SendMessageResponse]
    ) -> Command | LaterReply:
        """The reply to a send: at once, or when the message is as safe as this broker promises."""
        if result.status is not _PUT_OK or not waits or not self.makes_wait:
            return self._reply(command, result, result.status, accepted())
        later: LaterReply = asyncio.get_running_loop().create_future()
        self.tell_when_safe(result.end_offset, partial(self._reply_later, command, result, accepted, later))
        return later

    def _reply_later(
        self,
        command: Command,
        result: AppendResult,
        accepted: Callable[[], SendMessageResponse],
        later: LaterReply,
        status: PutMessageStatus,
    ) -> None:
        if not later.done():
            later.set_result(self._reply(command, result, status, accepted()))

    def _reply(
        self, command: Command, result: AppendResult, status: PutMessageStatus, header: SendMessageResponse
    ) -> Command:
        if status is _PUT_OK:
            return command.reply(header=header)
        code = STATUS_CODES.get(status, ResponseCode.SYSTEM_ERROR)
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


def _properties_of(run: Run, state: QueueState) -> Iterator[bytes]:
    """The properties of the messages of a run that went into one queue."""
    return (run[number][2] for number, one in enumerate(run.states) if one is state)


class DiskAndSlave:
    """Waits for both. The slave's status comes before the disk's, as in RocketMQ."""

    __slots__ = ("_copied", "_flushed", "_tell")

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._flushed: FlushOutcome | None = None
        self._copied: PutMessageStatus | None = None

    def flushed(self, outcome: FlushOutcome) -> None:
        self._flushed = outcome
        self._tell_when_over()

    def copied(self, status: PutMessageStatus) -> None:
        self._copied = status
        self._tell_when_over()

    def _tell_when_over(self) -> None:
        if self._flushed is None or self._copied is None:
            return
        if self._copied is _PUT_OK:
            _tell_flushed(self._tell, self._flushed)
        else:
            self._tell(self._copied)


def _tell_flushed(tell: Tell, flushed: FlushOutcome) -> None:
    tell(_PUT_OK if flushed is FlushOutcome.FLUSHED else PutMessageStatus.FLUSH_DISK_TIMEOUT)
