"""Pulling queues: for each one task with one request at a time, which the broker holds until there is a message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from downrange.client.consumer.addresses import address_of
from downrange.client.consumer.config import OFF, ConsumerConfig
from downrange.client.consumer.flow_control import queue_limits, reason_to_wait
from downrange.client.consumer.messages import ReceivedMessage, read_pulled, wanted
from downrange.client.consumer.offsets import OffsetTable
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.producer.retry import may_have_moved
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.pull import PullMessageRequest, PullMessageResponse, PullSysFlag
from downrange.protocol.bodies.routes import MASTER_ID
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import FlowControl, SubscriptionNotExist, SubscriptionNotLatest

log = logging.getLogger(__name__)

FLOW_CONTROL_PAUSE_SECONDS: Final = 0.02
_ANSWERS: Final = frozenset(
    {
        ResponseCode.SUCCESS,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_COMMIT: Final = int(PullSysFlag.COMMIT_OFFSET)
_SUSPEND: Final = int(PullSysFlag.SUSPEND)


class Membership(NamedTuple):
    """A consumer as a member of its group: the name of the group has its namespace."""

    session: Session
    group: str
    config: ConsumerConfig


class Receiver(Protocol):
    """Where messages go. `may_consume` is False while an orderly consumer does not hold the lock of the queue."""

    def accept(self, process_queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None: ...

    def may_consume(self, process_queue: ProcessQueue) -> bool: ...


class Pulling:
    """The pulls of one consumer.

    `subscriptions` is the consumer's own table, read before every pull. `moved` is told when a broker says that an
    offset lies outside its queue; it must stop the pull of that queue and begin another. Used on one event loop.
    """

    def __init__(
        self,
        membership: Membership,
        subscriptions: Mapping[str, Subscription],
        offsets: OffsetTable,
        receiver: Receiver,
        statistics: ConsumeStatistics,
        moved: Callable[[ProcessQueue, int], None],
    ) -> None:
        self._session, self._group, self._config = membership
        self._clock = self._session.clock
        self._subscriptions = subscriptions
        self._offsets = offsets
        self._receiver = receiver
        self._statistics = statistics
        self._moved = moved
        self._tasks: dict[ProcessQueue, asyncio.Task[None]] = {}
        self._suggested: dict[MessageQueue, int] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    def __repr__(self) -> str:
        return f"<Pulling {self._group} queues={len(self._tasks)}>"

    def begin(self, queue: ProcessQueue) -> None:
        task = asyncio.create_task(self._pull_for_ever(queue), name=f"downrange pull {queue.queue}")
        self._tasks[queue] = task
        task.add_done_callback(lambda _: self._tasks.pop(queue, None))

    async def stop(self, queues: Collection[ProcessQueue] | None = None) -> None:
        """Pull these queues, or all, no more. An answer on its way is not taken in."""
        tasks = [task for queue, task in self._tasks.items() if queues is None or queue in queues]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def restart(self, topic: str) -> None:
        """The subscription changed: a pull the broker holds would still be answered by the old one."""
        queues = [queue for queue in self._tasks if queue.queue.topic == topic]
        await self.stop(queues)
        for queue in queues:
            self.begin(queue)

    def pause(self) -> None:
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    async def _pull_for_ever(self, queue: ProcessQueue) -> None:
        exception_pause = self._config.pull_delay_when_exception_seconds
        while not queue.is_dropped:
            await self._resumed.wait()
            if not self._has_room(queue):
                await queue.wait_for_room()
                continue
            pause = exception_pause
            has_failed = False
            try:
                if self._receiver.may_consume(queue):
                    pause = max(self._config.pull_interval_seconds, await self._pull(queue))
            except FlowControl:
                pause = FLOW_CONTROL_PAUSE_SECONDS
            except MQError as error:
                log.warning("pull failed queue=%s reason=%s", queue.queue, error)
                self._suggested.pop(queue.queue, None)
                self._session.refresh_soon(queue.queue.topic)
                has_failed = True
                if may_have_moved(error):
                    queue.distrust_lock()
                if isinstance(error, SubscriptionNotExist | SubscriptionNotLatest):
                    self._session.heartbeats.beat_soon()
            except Exception:
                log.exception("pull failed queue=%s", queue.queue)  # a defect; the other queues go on
            if has_failed:  # no need to wait for an old master's return when there is a new one
                await self._session.route_change(queue.queue.topic, pause)
            elif pause:
                await self._clock.sleep(pause)

    def _has_room(self, queue: ProcessQueue) -> bool:
        config, topic, queues = self._config, queue.queue.topic, 1
        if config.pull_threshold_for_topic != OFF or config.pull_threshold_size_for_topic != OFF:
            queues = sum(1 for other in self._tasks if other.queue.topic == topic)
        limits = queue_limits(config, queues)
        reason = reason_to_wait(queue, limits)
        if reason is not None:
            log.debug("pull waits queue=%s reason=%s", queue.queue, reason)
        return reason is None

    async def _pull(self, queue: ProcessQueue) -> float:
        """Pull once and handle the answer; returns how many seconds to wait before the next pull."""
        subscription = self._subscriptions.get(queue.queue.topic)
        if subscription is None:
            return self._config.pull_delay_when_exception_seconds  # unsubscribed: the queue is about to go
        target = await address_of(self._session, queue.queue, self._suggested.get(queue.queue, MASTER_ID))
        command = self._request(queue, subscription, to_master=target.is_master)
        offset = queue.next_offset
        queue.last_pull_millis = self._clock.now()
        begun = self._clock.monotonic()
        reply = await self._session.invoke(target.address, command, self._config.pull_timeout_seconds, _ANSWERS)
        answer = reply.header(PullMessageResponse)
        self._suggested[queue.queue] = answer.suggest_which_broker_id
        if reply.code == ResponseCode.PULL_OFFSET_MOVED:
            return await self._correct(queue, answer.next_begin_offset)
        messages: Sequence[ReceivedMessage] = ()
        if reply.code == ResponseCode.SUCCESS:
            messages = read_pulled(
                reply.body_bytes,
                queue.queue,
                min_offset=answer.min_offset,
                max_offset=answer.max_offset,
                offset_delta=answer.offset_delta or 0,
                namespace=self._config.namespace,
                group=self._group,
            )
            now = self._clock.monotonic()
            self._statistics.topic(queue.queue.topic).pulled(now, now - begun, len(messages))
            messages = wanted(messages, subscription)
        self._take_in(queue, messages, answer.next_begin_offset)
        # A slave whose master is away sends us round in circles: not as fast as we can.
        is_stuck = reply.code == ResponseCode.PULL_RETRY_IMMEDIATELY and answer.next_begin_offset == offset
        return self._config.pull_delay_when_exception_seconds if is_stuck else 0.0

    def _request(self, queue: ProcessQueue, subscription: Subscription, *, to_master: bool) -> Command:
        """A pull also says how far the group is; slaves do not take that."""
        done = self._offsets.get(queue.queue) or 0
        commits = done > 0 and to_master and not self._config.is_broadcasting
        header = PullMessageRequest(
            consumer_group=self._group,
            topic=queue.queue.topic,
            queue_id=queue.queue.queue_id,
            queue_offset=queue.next_offset,
            max_msg_nums=self._config.pull_batch_size,
            sys_flag=_SUSPEND | _COMMIT if commits else _SUSPEND,
            commit_offset=done if commits else 0,
            suspend_timeout_millis=int(self._config.broker_suspend_seconds * 1000),
            sub_version=subscription.version,
            expression_type=subscription.expression_type,
            bname=queue.queue.broker_name,
        )
        return request(RequestCode.PULL_MESSAGE, header)

    def _take_in(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], next_offset: int) -> None:
        queue.corrections = 0
        queue.put(messages, next_offset)
        if messages:
            self._receiver.accept(queue, messages)
        elif not queue.message_count and next_offset > 0:
            # Nothing of it was for us: the group need not look at it again.
            self._offsets.update(queue.queue, next_offset, increase_only=True)

    async def _correct(self, queue: ProcessQueue, offset: int) -> float:
        """Our offset lies outside the queue: messages expired, or the queue was cut. Begin anew where it says."""
        log.warning("offset moved queue=%s from=%d to=%d", queue.queue, queue.next_offset, offset)
        if queue.corrections:
            queue.next_offset = offset
            return self._config.pull_delay_when_exception_seconds  # the broker is undecided
        self._moved(queue, offset)
        await asyncio.Event().wait()  # until this pull is stopped
        return 0.0
