"""A consumer that is handed messages: it pulls its share of the group's queues and calls back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from downrange.client.background_work import BackgroundWork
from downrange.client.config import ClientConfig
from downrange.client.consumer import broker_requests
from downrange.client.consumer.concurrent import ConcurrentConsumption
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.delivery_trace import DeliveryTrace, start_delivery_trace
from downrange.client.consumer.direct_consumption import consume_directly
from downrange.client.consumer.handover import Handover
from downrange.client.consumer.listener import Listener, OnBatch, OnMessage
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.offsets import offset_store, persist_regularly
from downrange.client.consumer.orderly import OrderlyConsumption
from downrange.client.consumer.pop.push import PopSide
from downrange.client.consumer.pop_retries import follow_pop_retries
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.pulling import Membership, Pulling
from downrange.client.consumer.queue_ownership import Consumption, QueueOwnership
from downrange.client.consumer.rebalance import RebalanceTimer
from downrange.client.consumer.redelivery import Redelivery
from downrange.client.consumer.replier import Replier
from downrange.client.consumer.retry import Later
from downrange.client.consumer.running_info import running_info
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.consumer.subscriptions import Subscriptions
from downrange.client.consumer.traced_listener import TracedListener
from downrange.client.errors import ClientClosed
from downrange.client.namespace import wrap
from downrange.client.producer.outgoing import InvalidTopic, check_consumer_group
from downrange.client.producer.request_reply import ReplyMessage
from downrange.client.session import Session
from downrange.model.errors import MessageError, MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL, Subscription
from downrange.model.topics import check_topic_name, retry_topic
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumerRunningInfo
from downrange.protocol.bodies.groups import ConsumerData, ConsumeType

log = logging.getLogger(__name__)


class AsyncPushConsumer:
    """One member of a consumer group, on one event loop.

    `async with AsyncPushConsumer("group", "host:9876", on_message=handle) as consumer:` and then `await
    consumer.subscribe("topic")`; without a callback, `async for message in consumer`.
    Holds always: a message counts as done only after its callback returned None (or, in a loop, the next message was
    asked for), so everything is delivered at least once; a queue is pulled by one task with one request at a time.
    With `client_rebalance=False` brokers share the queues out, and may have their messages leased (POP).
    After `close` no task of the consumer is left. A session that was passed in is not closed.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ConsumerConfig | None = None,
        *,
        on_message: OnMessage | None = None,
        on_batch: OnBatch | None = None,
        session: Session | None = None,
    ) -> None:
        check_consumer_group(group)
        self.config = config or ConsumerConfig()
        self.group = wrap(self.config.namespace, group)
        self._handover: Handover | None = None
        if on_message is None and on_batch is None:
            self._handover = Handover()
            on_message = self._handover.offer
        self._listener = Listener(on_message, on_batch, self.config.consume_message_batch_max_size)
        self._owns_session = session is None
        if session is None:
            # A broadcasting consumer finds its offset file by its client id, so that must survive a restart.
            name = self.config.instance_name if self.config.is_broadcasting else None
            session = Session(ClientConfig.of(namesrv), instance_name=name)
        self.session = session
        self._clock = session.clock
        if self.config.trace:
            self._listener = TracedListener(self._listener)
        self._subscriptions = Subscriptions(session, self.group)
        self._statistics = ConsumeStatistics()
        self._trace: DeliveryTrace | None = None
        self._offsets = offset_store(session, self.group, self.config)
        self._consumption = self._new_consumption()
        membership = Membership(session, self.group, self.config)
        self._pulling = Pulling(
            membership, self._subscriptions.table, self._offsets.table, self._consumption, self._statistics, self._moved
        )
        self._pop = PopSide(membership, self._subscriptions.table, self._listener, self._statistics)
        self._held = QueueOwnership(membership, self._offsets, self._consumption, self._pulling, self._pop.popping)
        self._rebalance_timer = RebalanceTimer(self._rebalance, self._clock, self.config.rebalance_seconds)
        self._first_rebalance = asyncio.Event()
        self._work = BackgroundWork()
        self._replier = Replier(session)
        self._started_millis = 0
        self._is_started = False
        self._is_draining = False
        self._is_closed = False

    def _new_consumption(self) -> Consumption:
        kind = OrderlyConsumption if self.config.orderly else ConcurrentConsumption
        return kind(
            self.config,
            self._listener,
            self._offsets.table,
            Redelivery(self.session, self.group, self.config.reconsume_limit),
            self._statistics,
            self._clock,
        )

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "draining" if self._is_draining else "open"
        waiting = sum(queue.message_count for queue in (*self._held, *self._pop.popping))
        topics = ",".join(self._subscriptions.table)
        return f"<AsyncPushConsumer {self.group} {state} topics={topics} queues={len(self.queues)} messages={waiting}>"

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Join the group and begin to consume. Returns after the queues were shared out for the first time."""
        if self._is_started:
            raise ClientClosed(f"the consumer {self.group} was started before; make a new one")
        broker_requests.join(self.session, self.group, self)
        self._is_started = True
        self._started_millis = self._clock.now()
        try:
            self.session.start()
            if isinstance(self._listener, TracedListener):
                self._trace = await start_delivery_trace(
                    self.session, self.group, self.config, self.config.consume_timeout_seconds
                )
                self._listener.trace = self._trace
            if not self.config.is_broadcasting:
                retries = retry_topic(self.group)
                self._subscriptions.table[retries] = self._subscriptions.new(retries, SUB_ALL, None)
            await self._look_up(list(self._subscriptions.table))
            for subscription in self._subscriptions:
                await self._subscriptions.check(subscription)
            # A pull is refused until the broker knows the subscription.
            self.session.heartbeats.add_consumer(self.group, self._describe)
            await self.session.heartbeats.beat()
            self._spawn(self._rebalance_timer.run(), "rebalance")
            period = self.config.persist_consumer_offset_seconds
            self._spawn(persist_regularly(self._offsets, self._clock, period), "offsets")
            self._spawn(self._consumption.run(), "consumption")
            if not self.config.client_rebalance:
                self._spawn(self._pop.holding.run(), "leases")
                self._spawn(self._pop.consumption.run(), "popped messages")
            if self._consumption.needs_lock:
                self._spawn(self._held.renew_locks_regularly(), "locks")
            await self._first_rebalance.wait()
        except BaseException:
            await self.close(0)
            raise
        return self

    async def drain(self, timeout: float | None = None) -> bool:
        """Pull and begin nothing more, wait for the callbacks that run, commit; whether all ended in time.

        Messages that were pulled and not begun are left to the next consumer of the queue.
        """
        self._is_draining = True
        if not self._is_started:
            return True
        seconds = self.config.close_timeout_seconds if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + seconds
        await self._held.stop(seconds)
        await asyncio.gather(self._pulling.stop(), self._pop.popping.stop())
        if self._handover is not None:
            self._handover.close()
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        in_time = all(await asyncio.gather(self._consumption.drain(left), self._pop.consumption.drain(left)))
        return await self._offsets.persist(confirmed=True) and in_time

    async def close(self, timeout: float | None = None) -> None:
        """Drain, give the queues to other members, leave the group, and close the session unless it was given."""
        if not self._is_started or self._is_closed:
            return
        self._is_closed = True
        await self.drain(timeout)
        await self._work.cancel()
        await self._held.close()
        await self._consumption.close()
        await self._pop.close()
        await self._replier.close()
        if self._trace is not None:
            await self._trace.writer.close()
        broker_requests.leave(self.session, self.group)
        await self.session.heartbeats.remove_consumer(self.group)
        if self._owns_session:
            await self.session.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._work.start(work, f"{name} {self.group}")

    # --- what to consume ------------------------------------------------------------------------------------------

    @property
    def queues(self) -> Collection[MessageQueue]:
        """The queues this consumer holds now; the id -1 stands for all queues of a broker, which it pops."""
        return (*self._held.names, *self._pop.popping.names)

    @property
    def subscriptions(self) -> Collection[Subscription]:
        """What this consumer subscribes to."""
        return tuple(self._subscriptions)

    async def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Consume a topic: messages with tags of `A || B`, or messages that an SQL92 expression matches.

        Replaces an earlier subscription to the topic. All members of a group must have equal subscriptions. May be
        called before `start` and on a running consumer, where the change takes effect within a moment.
        """
        try:
            check_topic_name(topic)
        except MessageError as error:
            raise InvalidTopic(str(error)) from None
        subscription = self._subscriptions.new(wrap(self.config.namespace, topic), expression, sql)
        if self._is_started:
            self._raise_if_closed()
            await self._look_up([subscription.topic])
            await self._subscriptions.check(subscription)
        self._subscriptions.table[subscription.topic] = subscription
        if self._is_started:
            await self.session.heartbeats.beat()
            await self._pulling.restart(subscription.topic)
            await self._pop.popping.restart(subscription.topic)
            self._rebalance_timer.soon()

    async def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more."""
        name = wrap(self.config.namespace, topic)
        if self._subscriptions.table.pop(name, None) is not None and self._is_started:
            self._raise_if_closed()
            await self.session.heartbeats.beat()
            await self._held.release_topic(name)

    async def commit(self) -> bool:
        """Commit all offsets now rather than with the next period; whether every broker took them."""
        return await self._offsets.persist(confirmed=True)

    def pause(self) -> None:
        """Pull nothing more for now; what was pulled is still consumed."""
        self._pulling.pause()
        self._pop.popping.pause()

    def resume(self) -> None:
        """Pull again after `pause`."""
        self._pulling.resume()
        self._pop.popping.resume()

    def _raise_if_closed(self) -> None:
        if self._is_closed or self._is_draining:
            raise ClientClosed(f"the consumer {self.group} is closed")

    async def _look_up(self, topics: Iterable[str]) -> None:
        for topic in topics:
            await self._subscriptions.follow(topic)

    def _describe(self) -> ConsumerData:
        return self._subscriptions.describe(ConsumeType.PASSIVELY, self.config)

    # --- messages for a loop --------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncGenerator[ReceivedMessage, None]:
        """The messages one by one. Asking for the next says that the one before is done."""
        if self._handover is None:
            raise ClientClosed(f"the consumer {self.group} has a callback; only one without can be iterated")
        if not self._is_started:
            raise ClientClosed(f"the consumer {self.group} is not started")
        return self._handover.messages()

    def later(self, message: ReceivedMessage, delay_level: int = 0) -> None:
        """In a loop over messages: this one could not be handled and shall be delivered again."""
        if self._handover is None:
            raise ClientClosed(f"the consumer {self.group} has a callback: return Later(…) there")
        self._handover.later(message, Later(delay_level))

    # --- replies --------------------------------------------------------------------------------------------------

    async def reply(self, request: ReceivedMessage, body: bytes | ReplyMessage) -> bool:
        """Answer a message that was sent with `request`; whether the client that asked has the answer.

        False when it is gone or waits no longer: nothing a further delivery could mend. Raises NotARequest when nobody
        asked, and SendFailed when no broker took the reply.
        """
        if not self._replier.is_started and (not self._is_started or self._is_closed):
            raise ClientClosed(f"the consumer {self.group} is not started, or closed")
        return await self._replier.reply(request, body)

    # --- sharing queues -------------------------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Hold exactly our share; whether that was reached."""
        changed: set[str] = set()
        is_balanced = await self._held.share_out(list(self._subscriptions.table), changed)
        if not (self.config.client_rebalance or self.config.is_broadcasting or self._is_draining):
            is_balanced &= await self._share_out_pop_retries(changed)
        if changed and not self._is_draining:
            await self._subscriptions.announce(changed)
        self._first_rebalance.set()
        self._spawn(self._subscriptions.compare(), "comparison of subscriptions")
        return is_balanced

    async def _share_out_pop_retries(self, changed: set[str]) -> bool:
        popped = {queue.topic for queue in self._pop.popping.names}
        try:
            new = await follow_pop_retries(self.group, self._subscriptions, self._held, popped)
        except MQError as error:
            log.info("pop retry topics not looked up group=%s reason=%s", self.group, error)
            return False
        if not new:
            return True
        await self.session.heartbeats.beat()  # a pull is refused until the broker knows the subscription
        return await self._held.share_out(new, changed)

    def _moved(self, queue: ProcessQueue, offset: int) -> None:
        self._spawn(self._held.restart(queue, offset), f"correct {queue.queue}")

    # --- what brokers ask -----------------------------------------------------------------------------------------

    def members_changed(self) -> None:
        """A broker says that the members of the group changed: share the queues out again."""
        if self._is_draining:
            return
        # The newcomer asks where to begin: let it know how far we are before it does.
        self._spawn(self._persist_now(), "offsets")
        self._rebalance_timer.soon()

    async def _persist_now(self) -> None:
        await self._offsets.persist()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """A broker says, for an operator, where to go on in queues of a topic."""
        ours = {queue: offset for queue, offset in offsets.items() if queue.topic == topic}
        log.info("offsets reset group=%s offsets=%s", self.group, ours)
        self._spawn(self._held.restart_all(ours), "reset")

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        """A broker asks how far this consumer is with the queues of a topic."""
        return self._held.positions(topic)

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo:
        """A broker asks, for an operator, for the state of this consumer."""
        return running_info(
            config=self.config,
            namesrv_addresses=self.session.config.namesrv_addresses,
            started_millis=self._started_millis,
            subscriptions=self._subscriptions,
            queues=self._held.info(),
            popped=self._pop.popping,
            statistics=self._statistics.table(self._clock.monotonic()),
            with_stacks=with_stacks,
        )

    async def consume_directly(self, record: bytes, broker_name: str) -> ConsumeMessageDirectlyResult:
        """Give a message that an operator chose to the listener, and tell what it said."""
        return await consume_directly(self._listener, self.config, self._clock, record, broker_name)
