"""A consumer that is handed messages: it pulls its share of the group's queues and calls back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from downrange.client.background_work import BackgroundWork
from downrange.client.config import ClientConfig
from downrange.client.consumer import broker_requests
from downrange.client.consumer.addresses import masters_of_route
from downrange.client.consumer.concurrent import ConcurrentConsumption
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.consumer.delivery_trace import DeliveryTrace
from downrange.client.consumer.handover import Handover
from downrange.client.consumer.held_queues import Consumption, HeldQueues
from downrange.client.consumer.listener import Listener, OnBatch, OnMessage
from downrange.client.consumer.messages import ReceivedMessage, received
from downrange.client.consumer.offsets import LocalOffsets, OffsetStore, RemoteOffsets
from downrange.client.consumer.orderly import OrderlyConsumption
from downrange.client.consumer.process_queue import ProcessQueue
from downrange.client.consumer.pulling import Pulling
from downrange.client.consumer.rebalance import RebalanceTimer
from downrange.client.consumer.redelivery import Redelivery
from downrange.client.consumer.retry import INNER_PRODUCER_GROUP, Later, verdict
from downrange.client.consumer.running_info import process_queue_info, running_info
from downrange.client.consumer.statistics import ConsumeStatistics
from downrange.client.consumer.traced_listener import TracedListener
from downrange.client.errors import ClientClosed, NoRoute
from downrange.client.messages import InvalidGroup, InvalidTopic
from downrange.client.namespace import wrap
from downrange.client.producer import AsyncProducer, start_trace
from downrange.client.request_reply import ReplyMessage, reply_to, send_reply
from downrange.client.session import Session
from downrange.client.trace_writer import TraceWriter
from downrange.client.unique_id import local_address
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.record import decode_record
from downrange.model.subscription import SQL92, SUB_ALL, TAG, Subscription, subscribe
from downrange.model.topics import check_group_name, check_topic_name, retry_topic
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumeResult, ConsumerRunningInfo
from downrange.protocol.bodies.groups import CheckClientBody, ConsumerData, ConsumeType
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

log = logging.getLogger(__name__)

DEFAULT_CONSUMER_GROUP: Final = "DEFAULT_CONSUMER"


class AsyncPushConsumer:
    """One member of a consumer group, on one event loop.

    `async with AsyncPushConsumer("group", "host:9876", on_message=handle) as consumer:` and then `await
    consumer.subscribe("topic")`; without a callback, `async for message in consumer`.
    Holds always: a message counts as done only after its callback returned None (or, in a loop, the next message was
    asked for), so everything is delivered at least once; a queue is pulled by one task with one request at a time.
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
        self._trace: TraceWriter | None = None
        self._owns_session = session is None
        if session is None:
            settings = namesrv if isinstance(namesrv, ClientConfig) else ClientConfig.of(namesrv)
            # A broadcasting consumer finds its offset file by its client id, so that must survive a restart.
            name = self.config.instance_name if self.config.is_broadcasting else None
            session = Session(settings, instance_name=name)
        self.session = session
        self._clock = session.clock
        if self.config.trace:
            self._listener = TracedListener(self._listener)
        self._subscriptions: dict[str, Subscription] = {}
        self._announced: dict[str, Subscription] = {}
        """Subscriptions brokers are being told and pulls do not name yet."""
        self._statistics = ConsumeStatistics()
        self._offsets: OffsetStore = (
            LocalOffsets(
                self.config.local_offset_store_dir, f"{local_address()}@{self.config.instance_name}", self.group
            )
            if self.config.is_broadcasting
            else RemoteOffsets(session, self.group)
        )
        self._consumption = self._new_consumption()
        self._pulling = Pulling(
            session,
            self.group,
            self.config,
            self._subscriptions,
            self._offsets.table,
            self._consumption,
            self._statistics,
            self._moved,
        )
        self._held = HeldQueues(session, self.group, self.config, self._offsets, self._consumption, self._pulling)
        self._rebalance_timer = RebalanceTimer(self._rebalance, self._clock, self.config.rebalance_seconds)
        self._first_rebalance = asyncio.Event()
        self._work = BackgroundWork()
        self._replier: AsyncProducer | None = None
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
        waiting = sum(queue.message_count for queue in self._held)
        topics = ",".join(self._subscriptions)
        return f"<AsyncPushConsumer {self.group} {state} topics={topics} queues={len(self._held)} messages={waiting}>"

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
                config = self.config
                self._trace = await start_trace(self.session, self.group, "CONSUME", config.trace_topic)
                self._listener.trace = DeliveryTrace(
                    self._trace,
                    self.group,
                    config.namespace,
                    config.trace_topic,
                    config.consume_timeout_seconds,
                    self._clock,
                )
            if not self.config.is_broadcasting:
                self._subscriptions[retry_topic(self.group)] = self._subscription(retry_topic(self.group), SUB_ALL, TAG)
            await self._look_up(list(self._subscriptions))
            for subscription in self._subscriptions.values():
                await self._check(subscription)
            # A pull is refused until the broker knows the subscription.
            self.session.heartbeats.add_consumer(self.group, self._describe)
            await self.session.heartbeats.beat()
            self._spawn(self._rebalance_timer.run(), "rebalance")
            self._spawn(self._persist_for_ever(), "offsets")
            self._spawn(self._consumption.run(), "consumption")
            if self._consumption.needs_lock:
                self._spawn(self._renew_locks_for_ever(), "locks")
            await self._first_rebalance.wait()
        except BaseException:
            await self.close(0)
            raise
        return self

    async def drain(self, timeout: float | None = None) -> bool:
        """Pull and begin nothing more, wait for the callbacks that run, commit; whether all ended in time.

        What was pulled and not begun is left to the next consumer of the queue.
        """
        self._is_draining = True
        if not self._is_started:
            return True
        seconds = self.config.close_timeout_seconds if timeout is None else timeout
        deadline = asyncio.get_running_loop().time() + seconds
        await self._held.stop(seconds)
        await self._pulling.stop()
        if self._handover is not None:
            self._handover.close()
        in_time = await self._consumption.drain(max(0.0, deadline - asyncio.get_running_loop().time()))
        return await self._offsets.persist(confirmed=True) and in_time

    async def close(self, timeout: float | None = None) -> None:
        """Drain, give the queues to the others of the group, leave it, close what was opened."""
        if not self._is_started or self._is_closed:
            return
        self._is_closed = True
        await self.drain(timeout)
        await self._work.cancel()
        await self._held.close()
        await self._consumption.close()
        if self._replier is not None:
            await self._replier.close()
        if self._trace is not None:
            await self._trace.close()
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
        """The queues this consumer holds now."""
        return tuple(self._held.names)

    @property
    def subscriptions(self) -> Collection[Subscription]:
        return tuple(self._subscriptions.values())

    async def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Consume a topic: messages with tags of `A || B`, or those an SQL92 expression matches.

        Replaces an earlier subscription to the topic. All members of a group must subscribe to the same. May be called
        before `start` and on a running consumer, where the change takes effect within a moment.
        """
        try:
            check_topic_name(topic)
        except MessageError as error:
            raise InvalidTopic(str(error)) from None
        text, kind = (expression, TAG) if sql is None else (sql, SQL92)
        if sql is not None and not sql.strip():
            raise MessageError("the SQL expression is blank")
        subscription = self._subscription(wrap(self.config.namespace, topic), text, kind)
        if self._is_started:
            self._raise_if_closed()
            await self._look_up([subscription.topic])
            await self._check(subscription)
        self._subscriptions[subscription.topic] = subscription
        if self._is_started:
            await self.session.heartbeats.beat()
            await self._pulling.restart(subscription.topic)
            self._rebalance_timer.soon()

    async def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more."""
        name = wrap(self.config.namespace, topic)
        if self._subscriptions.pop(name, None) is not None and self._is_started:
            self._raise_if_closed()
            await self.session.heartbeats.beat()
            await self._held.release_topic(name)

    async def commit(self) -> bool:
        """Commit what is done now rather than with the next period; whether every broker took it."""
        return await self._offsets.persist(confirmed=True)

    def pause(self) -> None:
        """Pull nothing more for now; what was pulled is still consumed."""
        self._pulling.pause()

    def resume(self) -> None:
        self._pulling.resume()

    def _subscription(self, topic: str, expression: str, kind: str) -> Subscription:
        known = self._subscriptions.get(topic)
        # Brokers take a subscription over the one they have only when its version is higher.
        version = max(self._clock.now(), known.version + 1 if known is not None else 0)
        return subscribe(topic, expression, kind, version)

    def _raise_if_closed(self) -> None:
        if self._is_closed or self._is_draining:
            raise ClientClosed(f"the consumer {self.group} is closed")

    async def _look_up(self, topics: Iterable[str]) -> None:
        for topic in topics:
            try:
                await self.session.follow(topic)
            except NoRoute as error:
                log.info("waiting for the topic to appear topic=%s reason=%s", topic, error)

    async def _check(self, subscription: Subscription) -> None:
        """Ask a broker whether it can evaluate an SQL expression; raises what is wrong with it."""
        route = self.session.known_route(subscription.topic)
        if subscription.is_tag_type or route is None:
            return
        body = CheckClientBody(client_id=self.session.client_id, group=self.group, subscription_data=subscription)
        address = masters_of_route(route, subscription.topic)[0].address
        await self.session.invoke(address, request(RequestCode.CHECK_CLIENT_CONFIG, body=encode_body(body)))

    def _describe(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ConsumeType.PASSIVELY,
            message_model=self.config.message_model,
            consume_from_where=self.config.consume_from_where,
            subscription_data_set=tuple({**self._subscriptions, **self._announced}.values()),
        )

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
        answer = body if isinstance(body, ReplyMessage) else reply_to(request, body)
        if self._replier is None:
            self._raise_if_not_running()
            self._replier = AsyncProducer(INNER_PRODUCER_GROUP, session=self.session)
            await self._replier.start()
        return await send_reply(self._replier, answer, request.broker_name)

    def _raise_if_not_running(self) -> None:
        if not self._is_started or self._is_closed:
            raise ClientClosed(f"the consumer {self.group} is not started, or closed")

    # --- sharing queues -------------------------------------------------------------------------------------------

    async def _rebalance(self) -> bool:
        """Hold exactly our share; whether that was reached."""
        changed: set[str] = set()
        is_balanced = await self._held.share_out(list(self._subscriptions), changed)
        if changed and not self._is_draining:
            await self._announce(changed)
        self._first_rebalance.set()
        return is_balanced

    async def _announce(self, topics: Collection[str]) -> None:
        """Tell brokers that our queues of these topics changed, by a higher version of the subscription.

        Pulls name the new version only afterwards: a broker refuses one that is ahead of what it was told.
        """
        self._announced = {
            topic: replace(known, version=max(self._clock.now(), known.version + 1))
            for topic in topics
            if (known := self._subscriptions.get(topic)) is not None
        }
        await self.session.heartbeats.beat()
        for topic, subscription in self._announced.items():
            known = self._subscriptions.get(topic)
            if known is not None and known.version < subscription.version:
                self._subscriptions[topic] = replace(known, version=subscription.version)
        self._announced = {}

    def _moved(self, queue: ProcessQueue, offset: int) -> None:
        self._spawn(self._held.restart(queue, offset), f"correct {queue.queue}")

    # --- for ever -------------------------------------------------------------------------------------------------

    async def _persist_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.config.persist_consumer_offset_seconds)
            await self._offsets.persist()

    async def _renew_locks_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self.config.lock_renewal_seconds)
            await self._held.renew_locks()

    # --- what brokers ask -----------------------------------------------------------------------------------------

    def members_changed(self) -> None:
        if self._is_draining:
            return
        # The newcomer asks where to begin: let it know how far we are before it does.
        self._spawn(self._persist_now(), "offsets")
        self._rebalance_timer.soon()

    async def _persist_now(self) -> None:
        await self._offsets.persist()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        ours = {queue: offset for queue, offset in offsets.items() if queue.topic == topic}
        log.info("offsets reset group=%s offsets=%s", self.group, ours)
        self._spawn(self._held.restart_all(ours), "reset")

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        table = self._offsets.table
        return {
            queue.queue: queue.done_offset if (offset := table.get(queue.queue)) is None else offset
            for queue in self._held
            if queue.queue.topic == topic
        }

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo:
        now = self._clock.monotonic()
        table = self._offsets.table
        return running_info(
            config=self.config,
            namesrv_addresses=self.session.config.namesrv_addresses,
            started_millis=self._started_millis,
            subscriptions=self._subscriptions.values(),
            queues={
                queue.queue: process_queue_info(
                    queue,
                    table.get(queue.queue),
                    is_locked=self.config.orderly and self._consumption.may_consume(queue),
                )
                for queue in self._held
            },
            statistics=self._statistics.table(now),
            with_stacks=with_stacks,
        )

    async def consume_directly(self, record: bytes, broker_name: str) -> ConsumeMessageDirectlyResult:
        stored = decode_record(record)
        queue = MessageQueue(stored.topic, broker_name, stored.queue_id)
        message = received(stored, queue, namespace=self.config.namespace)
        begun = self._clock.monotonic()
        result, remark = ConsumeResult.SUCCESS, None
        try:
            if not verdict(await self._listener.consume((message,)), 1).done:
                result = ConsumeResult.LATER
        except Exception as error:
            result, remark = ConsumeResult.THROW_EXCEPTION, f"{type(error).__name__}: {error}"
        return ConsumeMessageDirectlyResult(
            consume_result=result.value,
            remark=remark,
            spent_time_mills=int((self._clock.monotonic() - begun) * 1000),
            order=self.config.orderly,
            auto_commit=True,
        )


def check_consumer_group(group: str) -> None:
    try:
        check_group_name(group)
    except MessageError as error:
        raise InvalidGroup(str(error)) from None
    if group == DEFAULT_CONSUMER_GROUP:
        raise InvalidGroup(f"the group {group} is RocketMQ's placeholder; choose a name of your own")
