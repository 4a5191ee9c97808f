"""Consuming at one's own pace: queues are fetched ahead in the background, `poll` hands the messages out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from downrange.client.background_work import BackgroundWork
from downrange.client.config import ClientConfig
from downrange.client.consumer import broker_requests
from downrange.client.consumer.assigned_queue import AssignedQueue, FetchLimits
from downrange.client.consumer.delivery_trace import DeliveryTrace
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import LocalOffsets, OffsetStore, RemoteOffsets, start_offset
from downrange.client.consumer.pull import PullConsumer
from downrange.client.consumer.rebalance import RebalanceTimer, allotted, changes, readable_queues, route_of
from downrange.client.consumer.running_info import CLIENT_VERSION, stacks
from downrange.client.errors import ClientClosed, ClientError
from downrange.client.namespace import wrap
from downrange.client.producer import start_trace
from downrange.client.session import Session
from downrange.client.unique_id import local_address
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import SQL92, SUB_ALL, TAG, Subscription, subscribe
from downrange.model.topics import check_group_name, check_topic_name
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumeResult, ConsumerRunningInfo
from downrange.protocol.bodies.groups import CheckClientBody, ConsumerData, ConsumeType
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import NoPermission, SubscriptionGroupNotExist, SubscriptionParseFailed

log = logging.getLogger(__name__)

DEFAULT_BACK_MILLIS: Final = 30 * 60 * 1000
YIELD_SECONDS: Final = 0.01
# Errors that waiting does not mend: somebody must grant, create or correct something.
_REFUSALS: Final = (NoPermission, SubscriptionGroupNotExist, SubscriptionParseFailed)


class SubscriptionConflict(ClientError):
    """A consumer either subscribes to topics or is assigned queues; neither, or both, is a mistake."""


class NotAssigned(ClientError):
    """The queue is not this consumer's at the moment."""


class CommitFailed(ClientError):
    """Not every offset arrived at its broker; those that did not are committed with the next try."""

    retriable = True


class AsyncLitePullConsumer:
    """Reads messages for a consumer group, on one event loop, whenever `poll` is called.

    `async with AsyncLitePullConsumer("group", "host:9876") as consumer: await consumer.subscribe("topic")`, then
    `async for message in consumer` or `await consumer.poll()`. With `subscribe` the members of the group share the
    queues, with `assign` the caller chooses them. Holds always: a message counts as done, and may be committed, when
    the call after the one that handed it out is made; so one is lost only if the caller gave it up. After `close` no
    task of the consumer is left. A session that was passed in is not closed.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: LitePullConfig | None = None,
        *,
        session: Session | None = None,
    ) -> None:
        check_group_name(group)
        self.config = config or LitePullConfig()
        self.group = wrap(self.config.namespace, group)
        self._owns_session = session is None
        if session is None:
            settings = namesrv if isinstance(namesrv, ClientConfig) else ClientConfig.of(namesrv)
            session = Session(
                settings, instance_name=self.config.instance_name if self.config.is_broadcasting else None
            )
        self.session = session
        self._clock = self.session.clock
        self._reader = PullConsumer(group, session=self.session, namespace=self.config.namespace)
        self._offsets: OffsetStore = self._offset_store()
        self._limits = FetchLimits(
            self.config.pull_threshold_for_queue,
            self.config.pull_threshold_size_for_queue,
            self.config.consume_max_span,
        )
        self._started_millis = self._clock.now()
        self._start_millis = self.config.consume_timestamp or self._started_millis - DEFAULT_BACK_MILLIS
        self._subscriptions: dict[str, Subscription] = {}
        self._held: dict[MessageQueue, AssignedQueue] = {}
        self._fetchers: dict[MessageQueue, asyncio.Task[None]] = {}
        self._work = BackgroundWork(self._fail)
        self._timer = RebalanceTimer(self._rebalance, self._clock, self.config.rebalance_seconds)
        self._rebalancing = asyncio.Lock()
        self._ready: deque[AssignedQueue] = deque()
        self._arrival = asyncio.Event()
        self._unsettled: set[AssignedQueue] = set()
        self._resting: set[AssignedQueue] = set()
        """Queues whose fetching stopped for want of room, or because they are paused."""
        self._waiting = 0
        """Messages of all queues that wait for `poll`."""
        self._problem: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_member = False
        self._is_open = False
        self._yielded = 0.0
        self._trace: DeliveryTrace | None = None

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<AsyncLitePullConsumer {self.group} {state} queues={len(self._held)} waiting={self._waiting}>"

    def _offset_store(self) -> OffsetStore:
        if not self.config.is_broadcasting:
            return RemoteOffsets(self.session, self.group)
        client_id = f"{local_address()}@{self.config.instance_name}"
        return LocalOffsets(self.config.local_offset_store_dir, client_id, self.group)

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        if self._loop is not None:
            raise ClientClosed(f"the consumer {self.group} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self.session.start()
        if self.config.trace:
            topic = self.config.trace_topic
            writer = await start_trace(self.session, self.group, "CONSUME", topic)
            self._trace = DeliveryTrace(writer, self.group, self.config.namespace, topic, math.inf, self._clock)
        if self.config.auto_commit:
            self._spawn(self._commit_regularly(), "commits")
        return self

    async def close(self, *, last_are_done: bool = True) -> None:
        """Stop fetching, commit, leave the group, so that others take over where this consumer was.

        What was handed out last counts as done, unless told otherwise; without `auto_commit` nothing is committed.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._arrival.set()  # a poll that waits ends
        await self._work.cancel()
        self._fetchers.clear()
        if last_are_done:
            self._settle()
        if self.config.auto_commit:
            await self._offsets.persist(confirmed=True)
        if self._trace is not None:
            await self._trace.writer.close()
        if self._is_member:
            broker_requests.leave(self.session, self.group)
            await self.session.heartbeats.remove_consumer(self.group)
        if self._owns_session:
            await self.session.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A message that made the block fail was not handled.
        await self.close(last_are_done=error is None)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._work.start(work, f"{name} of {self.group}")

    def _fail(self, error: BaseException) -> None:
        """The caller of `poll` must know."""
        self._problem = error
        self._arrival.set()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClientClosed(f"the consumer {self.group} is {'not started' if self._loop is None else 'closed'}")
        if asyncio.get_running_loop() is not self._loop:
            raise ClientClosed(f"the consumer {self.group} was started on another event loop, or before a fork")

    # --- which queues ---------------------------------------------------------------------------------------------

    async def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Read a topic together with the other members of the group: all of it, tags `A || B`, or what `sql` says.

        Returns when the first share of queues is held, as far as brokers can be reached; more come and go as members
        do. A topic that does not exist yet is looked for until it does.
        """
        self._check_open()
        if self._held and not self._subscriptions:
            raise SubscriptionConflict("this consumer was assigned queues; one that subscribes must be another")
        name = self._topic(topic)
        self._subscriptions[name] = await self._subscription(name, expression, sql)
        if not self._is_member:
            broker_requests.join(self.session, self.group, self)
            self._is_member = True
            self.session.heartbeats.add_consumer(self.group, self._describe)
            await self.session.heartbeats.beat()  # before this nobody counts us in
            await self._rebalance()
            self._spawn(self._timer.run(), "rebalancing")
        else:
            await self.session.heartbeats.beat()
            await self._rebalance()

    async def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic to the others."""
        self._check_open()
        if self._subscriptions.pop(self._topic(topic), None) is not None:
            await self._rebalance()
            await self.session.heartbeats.beat()

    async def assign(
        self, queues: Iterable[MessageQueue], expression: str = SUB_ALL, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues, whoever else reads them. Replaces an assignment before it."""
        self._check_open()
        if self._subscriptions:
            raise SubscriptionConflict(
                "this consumer subscribed to topics; one that is assigned queues must be another"
            )
        wanted = [queue._replace(topic=self._topic(queue.topic)) for queue in queues]
        subscriptions = {
            topic: await self._subscription(topic, expression, sql) for topic in {queue.topic for queue in wanted}
        }
        change = changes(self._held, wanted)
        for queue in change.removed:
            await self._give_up(queue)
        for queue in change.added:
            await self._take(queue, subscriptions[queue.topic])

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues this consumer reads now."""
        return frozenset(self._held)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be read."""
        self._check_open()
        return await self._reader.queues(topic)

    def _topic(self, topic: str) -> str:
        check_topic_name(topic)
        return wrap(self.config.namespace, topic)

    async def _subscription(self, topic: str, expression: str, sql: str | None) -> Subscription:
        wanted = subscribe(topic, sql or expression, TAG if sql is None else SQL92, self._clock.now())
        try:
            route = await self.session.follow(topic)
        except MQError as error:
            log.warning("topic without route group=%s topic=%s reason=%s", self.group, topic, error)
            return wanted
        if sql is not None:  # an expression a broker cannot evaluate would silently match everything
            body = CheckClientBody(client_id=self.session.client_id, group=self.group, subscription_data=wanted)
            for data in route.broker_datas[:1]:
                address = data.broker_addrs[min(data.broker_addrs)]
                await self.session.invoke(address, request(RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body)))
        return wanted

    def _describe(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.ACTIVELY,
            message_model=self.config.message_model,
            consume_from_where=self.config.consume_from_where,
            subscription_data_set=tuple(self._subscriptions.values()),
        )

    # --- sharing queues with the group ------------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Hold exactly our share; whether that could be told and reached."""
        async with self._rebalancing:
            is_balanced = True
            if self.config.auto_commit:
                # Whoever takes a queue from us asks for its offset at about this time. It should be a fresh one.
                await self._offsets.persist()
            for queue in [queue for queue in self._held if queue.topic not in self._subscriptions]:
                await self._give_up(queue)
            for topic, subscription in list(self._subscriptions.items()):
                try:
                    mine = await self._share(topic)
                except MQError as error:
                    log.info("queues not shared out group=%s topic=%s reason=%s", self.group, topic, error)
                    is_balanced = False
                    continue
                change = changes([queue for queue in self._held if queue.topic == topic], mine)
                for queue in change.removed:
                    await self._give_up(queue)
                for queue in change.added:
                    try:
                        await self._take(queue, subscription)
                    except MQError as error:
                        log.warning("queue not taken group=%s queue=%s reason=%s", self.group, queue, error)
                        is_balanced = False
                for queue in mine:  # the expression may be a new one
                    if queue in self._held:
                        self._held[queue].subscription = subscription
            return is_balanced

    async def _share(self, topic: str) -> Collection[MessageQueue]:
        if self.config.is_broadcasting:
            return readable_queues(topic, await route_of(self.session, topic))
        return await allotted(self.session, self.group, topic, self.config.allocation)

    async def _take(self, queue: MessageQueue, subscription: Subscription) -> None:
        known = await self._offsets.load(queue)
        offset = await start_offset(self.session, queue, known, self.config.consume_from_where, self._start_millis)
        if known is not None:
            self._offsets.table.remember(queue, offset)
        held = self._held[queue] = AssignedQueue(queue, subscription, offset)
        self._start_fetching(held)
        log.info("queue taken group=%s queue=%s offset=%d", self.group, queue, offset)

    async def _give_up(self, queue: MessageQueue) -> None:
        """Commit what is done; what is in the user's hands now comes again to the next owner."""
        held = self._held.pop(queue)
        await self._stop_fetching(held)
        self._forget_waiting(held)
        self._unsettled.discard(held)
        self._resting.discard(held)
        if self.config.auto_commit:
            await self._offsets.persist([queue], confirmed=True)
        self._offsets.table.forget(queue)
        log.info("queue given up group=%s queue=%s offset=%d", self.group, queue, held.done)

    # --- what brokers ask (`broker_requests.GroupMember`) -----------------------------------------------------------

    def members_changed(self) -> None:
        self._timer.soon()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator moved the group: go on where we are told to."""
        for queue, offset in offsets.items():
            held = self._held.get(queue)
            if held is not None:
                log.info("queue reset group=%s queue=%s offset=%d", self.group, queue, offset)
                self._spawn(self._seek(held, offset), "reset")

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        return {queue: held.done for queue, held in self._held.items() if queue.topic == topic}

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo:
        return ConsumerRunningInfo(
            properties={
                "PROP_CONSUME_TYPE": ConsumeType.ACTIVELY.value,
                "PROP_CONSUMER_START_TIMESTAMP": str(self._started_millis),
                "PROP_CONSUMEORDERLY": "false",
                "PROP_CLIENT_VERSION": CLIENT_VERSION,
                "PROP_NAMESERVER_ADDR": "".join(f"{address};" for address in self.session.config.namesrv_addresses),
                "PROP_THREADPOOL_CORE_SIZE": "0",
            },
            subscription_set=tuple(self._subscriptions.values()),
            mq_table={queue: held.info() for queue, held in self._held.items()},
            jstack=stacks() if with_stacks else None,
        )

    async def consume_directly(self, record: bytes, broker_name: str) -> ConsumeMessageDirectlyResult:
        return ConsumeMessageDirectlyResult(
            consume_result=ConsumeResult.RETURN_NULL, remark="a pull consumer has no callback to hand a message to"
        )

    # --- fetching ahead -----------------------------------------------------------------------------------------------

    def _start_fetching(self, held: AssignedQueue) -> None:
        self._fetchers[held.queue] = self._work.start(self._fetch(held), f"fetching {held.queue}")

    async def _stop_fetching(self, held: AssignedQueue) -> None:
        task = self._fetchers.pop(held.queue, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _fetch(self, held: AssignedQueue) -> None:
        """Pull one batch after another while there is room for it."""
        config = self.config
        while True:
            while held.reason_to_wait(self._limits) or self._waiting > config.pull_threshold_for_all:
                held.may_fetch.clear()
                self._resting.add(held)
                await held.may_fetch.wait()
            try:
                result = await self._reader.pull(
                    held.queue,
                    held.fetch_offset,
                    config.pull_batch_size,
                    wait=config.broker_suspend_seconds,
                    subscription=held.subscription,
                    is_lite=True,
                )
            except MQError as error:
                self._note_problem(held, error)
                await self._clock.sleep(config.pull_delay_when_exception_seconds)
                continue
            held.add(result)
            if result.messages:
                self._waiting += len(result.messages)
                self._line_up(held)
            elif held.position != held.done:
                self._unsettled.add(held)

    def _note_problem(self, held: AssignedQueue, error: MQError) -> None:
        log.warning("pull failed group=%s queue=%s reason=%s", self.group, held.queue, error)
        if isinstance(error, _REFUSALS):
            self._fail(error)

    def _line_up(self, held: AssignedQueue) -> None:
        if held and not held.is_ready and not held.is_paused:
            held.is_ready = True
            self._ready.append(held)
            self._arrival.set()

    def _forget_waiting(self, held: AssignedQueue) -> None:
        self._waiting -= len(held)
        if held.is_ready:
            held.is_ready = False
            self._ready.remove(held)
        self._let_fetch()

    def _let_fetch(self) -> None:
        """There may be room again for those who rest."""
        if self._resting and self._waiting <= self.config.pull_threshold_for_all:
            for held in self._resting:
                held.may_fetch.set()
            self._resting.clear()

    # --- messages -------------------------------------------------------------------------------------------------

    async def poll(self, timeout: float | None = None, max_messages: int | None = None) -> list[ReceivedMessage]:
        """The next messages of one queue, in order; none when there is none within `timeout` seconds.

        Calling it says that the messages handed out before are done. Raises when a broker refuses to serve a queue.
        """
        self._check_open()
        self._settle()
        if self._is_due_to_yield():
            await asyncio.sleep(0)
            self._yielded = self._clock.monotonic()
        most = self.config.pull_batch_size if max_messages is None else max_messages
        messages = self._next(most)
        if messages:
            return messages
        seconds = self.config.poll_timeout_seconds if timeout is None else timeout
        if not self._held and not self._subscriptions:
            raise SubscriptionConflict("nothing to poll: subscribe to a topic or assign queues first")
        try:
            async with asyncio.timeout(seconds):
                while not messages and self._is_open:
                    self._raise_problem()
                    self._arrival.clear()
                    await self._arrival.wait()
                    messages = self._next(most)
        except TimeoutError:
            return []
        return messages

    def _is_due_to_yield(self) -> bool:
        """Whoever finds messages every time never waits: heartbeats and commits must have their turn all the same."""
        return self._clock.monotonic() - self._yielded >= YIELD_SECONDS

    def _next(self, most: int) -> list[ReceivedMessage]:
        if not self._ready:
            return []
        held = self._ready.popleft()
        held.is_ready = False
        messages = held.take(most)
        self._waiting -= len(messages)
        self._unsettled.add(held)
        self._line_up(held)  # at the end: the queues take turns
        self._let_fetch()
        if self._trace is not None:  # at once, as RocketMQ does: there is no callback whose end could be told
            self._trace.end(self._trace.begin(messages))
        return messages

    def give_back(self, messages: list[ReceivedMessage]) -> None:
        """Undo the hand-out of the last messages of a `poll`, which the caller did not get to."""
        held = self._held.get(messages[0].queue) if messages else None
        if held is not None:
            before = len(held)
            held.put_back(messages)
            self._waiting += len(held) - before
            self._line_up(held)

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Message after message, without end; leave the loop with `break`, or close the consumer."""
        while self._is_open:
            if self._ready and not self._is_due_to_yield():
                self._settle()
                messages = self._next(1)
            else:
                messages = await self.poll(max_messages=1)
            for message in messages:
                yield message

    def _settle(self) -> None:
        if self._unsettled:
            for held in self._unsettled:
                held.settle()
                self._offsets.table.update(held.queue, held.done)
            self._unsettled.clear()

    def _raise_problem(self) -> None:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    # --- positions ------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit everything handed out so far and wait for the brokers' word; raises CommitFailed."""
        self._check_open()
        self._settle()
        if not await self._offsets.persist(confirmed=True):
            raise CommitFailed(f"not every offset of {self.group} could be committed; the log says why")

    async def _commit_regularly(self) -> None:
        while True:
            await self._clock.sleep(self.config.auto_commit_interval_seconds)
            await self._offsets.persist()

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group goes on in a queue, as its broker knows it; None when it has never committed."""
        self._check_open()
        return await self._offsets.load(self._wire(queue))

    def position(self, queue: MessageQueue) -> int:
        """The offset of the next message `poll` will hand out of a queue."""
        return self._assigned(queue).position

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is still in a queue."""
        self._check_open()
        return await self._reader.min_offset(self._wire(queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset the next message of a queue will get."""
        self._check_open()
        return await self._reader.max_offset(self._wire(queue))

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at `offset`. With `auto_commit` that place is also committed."""
        self._check_open()
        await self._seek(self._assigned(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        self._check_open()
        held = self._assigned(queue)
        await self._seek(held, await self._reader.min_offset(held.queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        self._check_open()
        held = self._assigned(queue)
        await self._seek(held, await self._reader.max_offset(held.queue))

    async def seek_to_time(self, queue: MessageQueue, timestamp: int) -> None:
        """Go on at the messages stored at `timestamp`, in milliseconds since 1970."""
        self._check_open()
        held = self._assigned(queue)
        await self._seek(held, await self._reader.offset_at(held.queue, timestamp))

    async def _seek(self, held: AssignedQueue, offset: int) -> None:
        await self._stop_fetching(held)  # it may wait for a message at the old place
        self._forget_waiting(held)
        self._unsettled.discard(held)
        held.seek(offset)
        if held.queue in self._held:
            self._offsets.table.update(held.queue, offset)
            self._start_fetching(held)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Hand out nothing of these queues until `resume`; they stay ours."""
        for queue in queues:
            held = self._assigned(queue)
            held.is_paused = True
            if held.is_ready:
                held.is_ready = False
                self._ready.remove(held)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            held = self._assigned(queue)
            held.is_paused = False
            held.may_fetch.set()
            self._line_up(held)

    def _wire(self, queue: MessageQueue) -> MessageQueue:
        return queue._replace(topic=wrap(self.config.namespace, queue.topic))

    def _assigned(self, queue: MessageQueue) -> AssignedQueue:
        held = self._held.get(self._wire(queue))
        if held is None:
            raise NotAssigned(
                f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name} is not assigned to this consumer"
            )
        return held
