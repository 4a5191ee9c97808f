"""Consuming at one's own pace: queues are fetched ahead in the background, `poll` hands the messages out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from downrange.client.background_work import BackgroundWork
from downrange.client.config import ClientConfig
from downrange.client.consumer import broker_requests
from downrange.client.consumer.assigned_queues import AssignedQueues
from downrange.client.consumer.delivery_trace import DeliveryTrace, start_delivery_trace
from downrange.client.consumer.fetching import Fetching
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import offset_store, persist_regularly
from downrange.client.consumer.pull import PullConsumer
from downrange.client.consumer.rebalance import RebalanceTimer
from downrange.client.consumer.running_info import java_properties, stacks
from downrange.client.consumer.subscriptions import Subscriptions
from downrange.client.errors import ClientClosed, CommitFailed, SubscriptionConflict
from downrange.client.namespace import wrap
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL, Subscription
from downrange.model.topics import check_group_name, check_topic_name
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumeResult, ConsumerRunningInfo
from downrange.protocol.bodies.groups import ConsumerData, ConsumeType

log = logging.getLogger(__name__)

YIELD_SECONDS: Final = 0.01


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
            # A broadcasting consumer finds its offset file by its client id, so that must survive a restart.
            name = self.config.instance_name if self.config.is_broadcasting else None
            session = Session(ClientConfig.of(namesrv), instance_name=name)
        self.session = session
        self._clock = self.session.clock
        self._reader = PullConsumer(group, session=self.session, namespace=self.config.namespace)
        self._offsets = offset_store(session, self.group, self.config)
        self._fetching = Fetching(self._reader, self.config)
        self._queues = AssignedQueues(session, self.group, self.config, self._offsets, self._fetching)
        self._subscriptions = Subscriptions(session, self.group)
        self._started_millis = self._clock.now()
        self._timer = RebalanceTimer(self._rebalance, self._clock, self.config.rebalance_seconds)
        self._work = BackgroundWork(self._fetching.fail)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_member = False
        self._is_open = False
        self._yielded = 0.0
        self._trace: DeliveryTrace | None = None

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        queues, waiting = len(self._queues), self._fetching.waiting
        return f"<AsyncLitePullConsumer {self.group} {state} queues={queues} waiting={waiting}>"

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Begin to work; `async with` does this. A consumer starts once."""
        if self._loop is not None:
            raise ClientClosed(f"the consumer {self.group} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self.session.start()
        if self.config.trace:
            self._trace = await start_delivery_trace(self.session, self.group, self.config, math.inf)
        if self.config.auto_commit:
            period = self.config.auto_commit_interval_seconds
            self._spawn(persist_regularly(self._offsets, self._clock, period), "commits")
        return self

    async def close(self, *, last_are_done: bool = True) -> None:
        """Stop fetching, commit, and leave the group, so that other members go on where this consumer was.

        The messages handed out last count as done, unless told otherwise; without `auto_commit` nothing is committed.
        """
        if not self._is_open:
            return
        self._is_open = False
        self._fetching.wake()  # a poll that waits ends
        await self._work.cancel()
        await self._fetching.close()
        if last_are_done:
            self._queues.settle()
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

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClientClosed(f"the consumer {self.group} is {'not started' if self._loop is None else 'closed'}")
        if asyncio.get_running_loop() is not self._loop:
            raise ClientClosed(f"the consumer {self.group} was started on another event loop, or before a fork")

    # --- which queues ---------------------------------------------------------------------------------------------

    async def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Read a topic together with the other members: all of it, tags `A || B`, or messages that `sql` matches.

        Returns when the first share of queues is held, as far as brokers can be reached; more come and go as members
        do. A topic that does not exist yet is looked for until it does.
        """
        self._check_open()
        if self._queues and not self._subscriptions:
            raise SubscriptionConflict("this consumer was assigned queues; one that subscribes must be another")
        name = self._topic(topic)
        self._subscriptions.table[name] = await self._subscription(name, expression, sql)
        if not self._is_member:
            broker_requests.join(self.session, self.group, self)
            self._is_member = True
            self.session.heartbeats.add_consumer(self.group, self._describe)
            await self.session.heartbeats.beat()  # only then do the other members count this one in
            await self._rebalance()
            self._spawn(self._timer.run(), "rebalancing")
        else:
            await self.session.heartbeats.beat()
            await self._rebalance()

    async def unsubscribe(self, topic: str) -> None:
        """Give the queues of a topic to the other members."""
        self._check_open()
        if self._subscriptions.table.pop(self._topic(topic), None) is not None:
            await self._rebalance()
            await self.session.heartbeats.beat()

    async def assign(
        self, queues: Iterable[MessageQueue], expression: str = SUB_ALL, *, sql: str | None = None
    ) -> None:
        """Read exactly these queues, whatever other consumers read. Replaces an earlier assignment."""
        self._check_open()
        if self._subscriptions:
            raise SubscriptionConflict(
                "this consumer subscribed to topics; one that is assigned queues must be another"
            )
        wanted = [queue._replace(topic=self._topic(queue.topic)) for queue in queues]
        subscriptions = {
            topic: await self._subscription(topic, expression, sql) for topic in {queue.topic for queue in wanted}
        }
        await self._queues.assign(wanted, subscriptions)

    @property
    def assignment(self) -> frozenset[MessageQueue]:
        """The queues this consumer reads now."""
        return frozenset(self._queues)

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be read."""
        self._check_open()
        return await self._reader.queues(topic)

    def _topic(self, topic: str) -> str:
        check_topic_name(topic)
        return wrap(self.config.namespace, topic)

    async def _subscription(self, topic: str, expression: str, sql: str | None) -> Subscription:
        wanted = self._subscriptions.new(topic, expression, sql)
        try:
            exists = await self._subscriptions.follow(topic)
        except MQError as error:
            log.warning("topic without route group=%s topic=%s reason=%s", self.group, topic, error)
            exists = False
        if exists:
            await self._subscriptions.check(wanted)
        return wanted

    def _describe(self) -> ConsumerData:
        return self._subscriptions.describe(ConsumeType.ACTIVELY, self.config)

    async def _rebalance(self) -> bool:
        is_balanced = await self._queues.share_out(self._subscriptions.table)
        self._spawn(self._subscriptions.compare(), "comparison of subscriptions")
        return is_balanced

    # --- what brokers ask (`broker_requests.GroupMember`) -----------------------------------------------------------

    def members_changed(self) -> None:
        """A broker says that the members of the group changed: share the queues out again."""
        self._timer.soon()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator moved the group: go on where we are told to."""
        for queue, offset in offsets.items():
            held = self._queues.get(queue)
            if held is not None:
                log.info("queue reset group=%s queue=%s offset=%d", self.group, queue, offset)
                self._spawn(self._queues.seek(held, offset), "reset")

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        """A broker asks how far this consumer is with the queues of a topic."""
        return self._queues.positions(topic)

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo:
        """A broker asks, for an operator, for the state of this consumer."""
        return ConsumerRunningInfo(
            properties=java_properties(
                ConsumeType.ACTIVELY, self._started_millis, self.session.config.namesrv_addresses
            ),
            subscription_set=tuple(self._subscriptions),
            mq_table=self._queues.info(),
            jstack=stacks() if with_stacks else None,
        )

    async def consume_directly(self, record: bytes, broker_name: str) -> ConsumeMessageDirectlyResult:
        """An operator wants a message consumed here: a consumer that polls cannot."""
        return ConsumeMessageDirectlyResult(
            consume_result=ConsumeResult.RETURN_NULL, remark="a pull consumer has no callback to hand a message to"
        )

    # --- messages -------------------------------------------------------------------------------------------------

    async def poll(self, timeout: float | None = None, max_messages: int | None = None) -> list[ReceivedMessage]:
        """The next messages of one queue, in order; none when there is none within `timeout` seconds.

        Calling it says that the messages handed out before are done. Raises when a broker refuses to serve a queue.
        """
        self._check_open()
        self._queues.settle()
        if self._is_due_to_yield():
            await asyncio.sleep(0)
            self._yielded = self._clock.monotonic()
        most = self.config.pull_batch_size if max_messages is None else max_messages
        messages = self._next(most)
        if messages:
            return messages
        seconds = self.config.poll_timeout_seconds if timeout is None else timeout
        if not self._queues and not self._subscriptions:
            raise SubscriptionConflict("nothing to poll: subscribe to a topic or assign queues first")
        try:
            async with asyncio.timeout(seconds):
                while not messages and self._is_open:
                    await self._fetching.arrival()
                    messages = self._next(most)
        except TimeoutError:
            return []
        return messages

    def _is_due_to_yield(self) -> bool:
        """Let heartbeats and commits have their turn: a `poll` that always finds messages never waits for anything."""
        return self._clock.monotonic() - self._yielded >= YIELD_SECONDS

    def _next(self, most: int) -> list[ReceivedMessage]:
        messages = self._fetching.take(most)
        if messages and self._trace is not None:
            # At once, as RocketMQ does: there is no callback whose end could be told.
            self._trace.end(self._trace.begin(messages))
        return messages

    def give_back(self, messages: list[ReceivedMessage]) -> None:
        """Undo the hand-out of the last messages of a `poll`, which the caller did not get to."""
        self._queues.give_back(messages)

    async def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Message after message, without end; leave the loop with `break`, or close the consumer."""
        while self._is_open:
            if self._fetching.line and not self._is_due_to_yield():
                self._queues.settle()
                messages = self._next(1)
            else:
                messages = await self.poll(max_messages=1)
            for message in messages:
                yield message

    # --- positions ------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit everything handed out so far and wait for the brokers' word; raises CommitFailed."""
        self._check_open()
        self._queues.settle()
        if not await self._offsets.persist(confirmed=True):
            raise CommitFailed(f"not every offset of {self.group} could be committed; the log says why")

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group goes on in a queue, as its broker knows it; None when it has never committed."""
        self._check_open()
        return await self._offsets.load(self._queues.on_the_wire(queue))

    def position(self, queue: MessageQueue) -> int:
        """The offset of the next message `poll` will hand out of a queue."""
        return self._queues.assigned(queue).position

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is still in a queue."""
        self._check_open()
        return await self._reader.min_offset(self._queues.on_the_wire(queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset the next message of a queue will get."""
        self._check_open()
        return await self._reader.max_offset(self._queues.on_the_wire(queue))

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at `offset`. With `auto_commit` that place is also committed."""
        self._check_open()
        await self._queues.seek(self._queues.assigned(queue), offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on with the oldest message of the queue."""
        self._check_open()
        held = self._queues.assigned(queue)
        await self._queues.seek(held, await self._reader.min_offset(held.queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on with the next message that arrives in the queue."""
        self._check_open()
        held = self._queues.assigned(queue)
        await self._queues.seek(held, await self._reader.max_offset(held.queue))

    async def seek_to_time(self, queue: MessageQueue, timestamp: int) -> None:
        """Go on at the messages stored at `timestamp`, in milliseconds since 1970."""
        self._check_open()
        held = self._queues.assigned(queue)
        await self._queues.seek(held, await self._reader.offset_at(held.queue, timestamp))

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Hand out nothing of these queues until `resume`; they stay ours."""
        for queue in queues:
            self._fetching.pause(self._queues.assigned(queue))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch again from queues that were paused."""
        for queue in queues:
            self._fetching.resume(self._queues.assigned(queue))
