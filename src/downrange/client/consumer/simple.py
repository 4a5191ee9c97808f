"""Consuming message by message: `receive` leases messages, `ack` ends a lease, and nobody owns a queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, NamedTuple, Self

from downrange.client.config import ClientConfig
from downrange.client.consumer import broker_requests
from downrange.client.consumer.lease_trace import LeaseTrace, start_lease_trace
from downrange.client.consumer.pop.leases import INIT_MODES, Leases, Wish, is_away
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.rebalance import readable_queues, route_of
from downrange.client.consumer.running_info import java_properties, stacks
from downrange.client.consumer.simple_config import SimpleConsumerConfig, seconds_of
from downrange.client.consumer.subscriptions import Subscriptions
from downrange.client.errors import AckFailed, ClientClosed, SubscriptionConflict
from downrange.client.namespace import wrap
from downrange.client.producer.outgoing import InvalidTopic, check_consumer_group
from downrange.client.session import Session
from downrange.model.errors import MessageError, MQError
from downrange.model.message import MessageQueue
from downrange.model.subscription import SUB_ALL, Subscription
from downrange.model.topics import check_topic_name
from downrange.protocol.bodies.consumers import ConsumeMessageDirectlyResult, ConsumeResult, ConsumerRunningInfo
from downrange.protocol.bodies.groups import ConsumerData, ConsumeType
from downrange.protocol.bodies.pop import MOST_MESSAGES
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.settings import ConfigError

log = logging.getLogger(__name__)

# Brokers are asked again after this time at the latest: RocketMQ 5.3 wakes nobody when a message comes again.
_WAIT_SECONDS: Final = 5.0
# How long a broker that could not be asked is left alone, if there are others.
_AWAY_SECONDS: Final = 1.0
# After being woken for a message that another consumer got.
_PAUSE_SECONDS: Final = 0.02


class _Place(NamedTuple):
    """Where to pop: a topic at a broker."""

    topic: str
    broker_name: str


class AsyncSimpleConsumer:
    """Leases messages for a consumer group, on one event loop, whenever `receive` is called. [SimpleConsumer]

    `async with AsyncSimpleConsumer("group", "host:9876") as consumer: await consumer.subscribe("topic")`, then `for
    message in await consumer.receive(16, 30)` and `await consumer.ack(message)`. A message that is not acknowledged
    within its invisible duration comes again, to any consumer of the group, with one more in `delivery_attempt`.
    Tasks may call it at the same time. It needs brokers of RocketMQ 5 or Downrange. A session that was passed in is not
    closed.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: SimpleConsumerConfig | None = None,
        *,
        session: Session | None = None,
    ) -> None:
        check_consumer_group(group)
        self.config = config or SimpleConsumerConfig()
        self.group = wrap(self.config.namespace, group)
        self._owns_session = session is None
        self.session = session or Session(ClientConfig.of(namesrv))
        self._clock = self.session.clock
        self._leases = Leases(self.session, self.group, self.config.namespace, self.config.retry_seconds)
        self._subscriptions = Subscriptions(self.session, self.group)
        self._routes: dict[str, tuple[TopicRouteData, Sequence[_Place]]] = {}
        self._away: dict[_Place, float] = {}
        self._turn = 0
        self._started_millis = self._clock.now()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._trace: LeaseTrace | None = None

    def __repr__(self) -> str:
        state = "new" if self._loop is None else "closed" if self._closing.is_set() else "open"
        return f"<AsyncSimpleConsumer {self.group} {state} topics={','.join(self._subscriptions.table)}>"

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Join the group."""
        if self._loop is not None:
            raise ClientClosed(f"the consumer {self.group} was started before; make a new one")
        broker_requests.join(self.session, self.group, self)
        self._loop = asyncio.get_running_loop()
        self.session.start()
        if self.config.trace:
            self._trace = await start_lease_trace(self.session, self.group, self.config)
        self.session.heartbeats.add_consumer(self.group, self._describe)
        return self

    async def close(self) -> None:
        """Leave the group. Messages that were received and not acknowledged come again when their time is over."""
        if self._loop is None or self._closing.is_set():
            return
        self._closing.set()
        broker_requests.leave(self.session, self.group)
        await self._leases.close()
        if self._trace is not None:
            await self._trace.close()
        await self.session.heartbeats.remove_consumer(self.group)
        if self._owns_session:
            await self.session.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._loop is None or self._closing.is_set():
            raise ClientClosed(f"the consumer {self.group} is {'not started' if self._loop is None else 'closed'}")
        if asyncio.get_running_loop() is not self._loop:
            raise ClientClosed(f"the consumer {self.group} was started on another event loop, or before a fork")

    # --- which topics ---------------------------------------------------------------------------------------------

    async def subscribe(self, topic: str, expression: str = SUB_ALL, *, sql: str | None = None) -> None:
        """Receive messages of a topic: all of them, those with tags of `A || B`, or those that `sql` matches.

        Replaces an earlier subscription to the topic. All consumers of a group must have equal subscriptions. A topic
        that does not exist yet is looked for by `receive`.
        """
        self._check_open()
        subscription = self._subscriptions.new(self._topic(topic), expression, sql)
        if await self._subscriptions.follow(subscription.topic):
            await self._subscriptions.check(subscription)
        self._subscriptions.table[subscription.topic] = subscription
        await self.session.heartbeats.beat()

    async def unsubscribe(self, topic: str) -> None:
        """Receive messages of a topic no more."""
        self._check_open()
        if self._subscriptions.table.pop(self._topic(topic), None) is not None:
            await self.session.heartbeats.beat()

    @property
    def subscriptions(self) -> Collection[Subscription]:
        """What this consumer subscribes to."""
        return tuple(self._subscriptions)

    def _topic(self, topic: str) -> str:
        try:
            check_topic_name(topic)
        except MessageError as error:
            raise InvalidTopic(str(error)) from None
        return wrap(self.config.namespace, topic)

    def _describe(self) -> ConsumerData:
        return self._subscriptions.describe(ConsumeType.ACTIVELY, self.config)

    # --- messages -------------------------------------------------------------------------------------------------

    async def receive(
        self,
        max_message_num: int,
        invisible_duration: float | timedelta,
        await_duration: float | timedelta | None = None,
    ) -> list[PoppedMessage]:
        """Lease up to `max_message_num` messages for `invisible_duration`, seconds or a timedelta.

        Waits up to `await_duration` until there is a message, and returns none when none came. Topics and brokers take
        turns. Raises when a broker refuses, and when no broker could be asked all the time.
        """
        self._check_open()
        if isinstance(max_message_num, bool) or not isinstance(max_message_num, int) or max_message_num < 1:
            raise ConfigError(f"max_message_num is {max_message_num!r}; it must be a positive number")
        invisible_millis = round(seconds_of("invisible_duration", invisible_duration) * 1000)
        if invisible_millis < 1:
            raise ConfigError("invisible_duration is 0; a message must be invisible for some time")
        if not self._subscriptions:
            raise SubscriptionConflict("nothing to receive: subscribe to a topic first")
        asked = self.config.await_duration if await_duration is None else await_duration
        messages = await self._receive(max_message_num, invisible_millis, seconds_of("await_duration", asked))
        if self._trace is not None:
            self._trace.received(messages)
        return messages

    async def _receive(self, most: int, invisible_millis: int, seconds: float) -> list[PoppedMessage]:
        end = self._clock.monotonic() + seconds
        is_woken = False
        while not self._closing.is_set():
            errors: dict[_Place, MQError] = {}
            places = await self._places(errors)
            messages = await self._pop(places, most, invisible_millis, errors)
            rest = end - self._clock.monotonic()
            if messages or (rest <= 0 and not errors):
                return messages
            if rest <= 0:
                if len(errors) >= len(places):
                    raise next(iter(errors.values()))
                return []
            if is_woken:
                await self._pause(min(_PAUSE_SECONDS, rest))
            is_woken = await self._wait([place for place in places if place not in errors], min(rest, _WAIT_SECONDS))
        return []

    async def _places(self, errors: dict[_Place, MQError]) -> Sequence[_Place]:
        """The brokers of all topics, another one first each time."""
        found: list[_Place] = []
        for topic in list(self._subscriptions.table):
            try:
                found += self._brokers_of(topic, await route_of(self.session, topic))
            except MQError as error:
                errors[_Place(topic, "")] = error
        if not found:
            return list(errors)
        self._turn = (self._turn + 1) % len(found)
        found = found[self._turn :] + found[: self._turn]
        now = self._clock.monotonic()
        here = [place for place in found if self._away.get(place, now) <= now]
        return here or found

    def _brokers_of(self, topic: str, route: TopicRouteData) -> Sequence[_Place]:
        known = self._routes.get(topic)
        if known is None or known[0] is not route:
            names = dict.fromkeys(queue.broker_name for queue in readable_queues(topic, route))
            known = self._routes[topic] = (route, [_Place(topic, name) for name in names])
        return known[1]

    async def _pop(
        self, places: Iterable[_Place], most: int, invisible_millis: int, errors: dict[_Place, MQError]
    ) -> list[PoppedMessage]:
        """Pop what is there now, of one broker after the other; an error of one does not keep others from answering."""
        messages: list[PoppedMessage] = []
        for place in places:
            while place not in errors and len(messages) < most:
                size = min(most - len(messages), MOST_MESSAGES)
                wish = self._wish(place, size, invisible_millis)
                if wish is None:
                    break
                try:
                    popped = await self._leases.pop(place.broker_name, wish)
                except MQError as error:
                    self._failed(place, error)
                    if not messages and not is_away(error):
                        raise
                    errors[place] = error
                    break
                messages += popped
                if not popped:
                    break
        return messages

    def _wish(self, place: _Place, most: int, invisible_millis: int) -> Wish | None:
        subscription = self._subscriptions.table.get(place.topic)
        if subscription is None:
            return None  # unsubscribed meanwhile
        return Wish(subscription, most, invisible_millis, INIT_MODES[self.config.consume_from_where])

    def _failed(self, place: _Place, error: MQError) -> None:
        log.info("broker could not be asked topic=%s broker=%s reason=%s", *place, error)
        self._away[place] = self._clock.monotonic() + _AWAY_SECONDS
        self.session.refresh_soon(place.topic)

    async def _wait(self, places: Sequence[_Place], seconds: float) -> bool:
        """Wait until a broker says that it has messages, and return whether one did; all are asked at the same time."""
        end = self._clock.monotonic() + seconds
        asking = {asyncio.ensure_future(self._ask_for_messages(place, seconds)) for place in places}
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while asking and not closing.done():
                done, _ = await asyncio.wait({*asking, closing}, return_when=asyncio.FIRST_COMPLETED)
                if any(task.result() for task in done & asking if task is not closing):
                    return True
                asking -= done
        finally:
            for task in (*asking, closing):
                task.cancel()
            await asyncio.gather(*asking, closing, return_exceptions=True)
        await self._pause(min(end - self._clock.monotonic(), _AWAY_SECONDS))  # brokers are away, or full
        return False

    async def _ask_for_messages(self, place: _Place, seconds: float) -> bool:
        wish = self._wish(place, 1, 0)
        try:
            return wish is not None and await self._leases.wait(place.broker_name, wish, seconds)
        except MQError as error:
            self._failed(place, error)
            return False

    async def _pause(self, seconds: float) -> None:
        if seconds > 0 and not self._closing.is_set():
            await self._clock.sleep(seconds)

    async def ack(self, message: PoppedMessage) -> None:
        """Say that a message is done: it does not come again.

        Raises when the broker does not say so within `retry_seconds`; trying again does no harm. When the invisible
        duration is over the broker says so all the same, and the message comes again.
        """
        for error in (await self._ack((message,))).values():
            raise error

    async def ack_many(self, messages: Iterable[PoppedMessage]) -> None:
        """Say that messages are done, with one request to each broker; raises AckFailed, which lists the others."""
        wanted = tuple(messages)
        failed = await self._ack(wanted)
        if failed:
            raise AckFailed(failed, len(wanted))

    async def _ack(self, messages: Sequence[PoppedMessage]) -> Mapping[PoppedMessage, MQError]:
        self._check_open()
        failed = await self._leases.ack(messages)
        if self._trace is not None:
            self._trace.acknowledged(message for message in messages if message not in failed)
        return failed

    async def change_invisible_duration(self, message: PoppedMessage, invisible_duration: float | timedelta) -> None:
        """Let a message come again so many seconds from now, unless it is acknowledged before; 0: at once.

        `message.receipt_handle` is replaced: copies of the old one are void.
        """
        self._check_open()
        await self._leases.change_invisible_duration(message, seconds_of("invisible_duration", invisible_duration))

    async def forward_to_dead_letter_queue(self, message: PoppedMessage) -> None:
        """Give a message up: it goes to the dead letters of the group, and does not come again."""
        self._check_open()
        await self._leases.make_dead_letter(message)
        if self._trace is not None:
            self._trace.given_up(message)

    # --- what brokers ask (`broker_requests.GroupMember`) -----------------------------------------------------------

    def members_changed(self) -> None:
        """Consumers come and go: nothing is shared out."""

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """The broker moves the offsets of a group that pops; here is nothing to move."""

    def consumer_status(self, topic: str) -> Mapping[MessageQueue, int]:
        """A broker asks how far this consumer is: one that leases messages has no offsets."""
        return {}

    def running_info(self, *, with_stacks: bool) -> ConsumerRunningInfo:
        """A broker asks, for an operator, for the state of this consumer."""
        return ConsumerRunningInfo(
            properties=java_properties(
                ConsumeType.ACTIVELY, self._started_millis, self.session.config.namesrv_addresses
            ),
            subscription_set=tuple(self._subscriptions),
            jstack=stacks() if with_stacks else None,
        )

    async def consume_directly(self, record: bytes, broker_name: str) -> ConsumeMessageDirectlyResult:
        """An operator wants a message consumed here: a consumer without a listener cannot."""
        return ConsumeMessageDirectlyResult(
            consume_result=ConsumeResult.RETURN_NULL, remark="a simple consumer has no callback to hand a message to"
        )
