"""Sending messages: pick a queue, send, and when that fails, find another way within the time given."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Literal, Self

from downrange.client import forks
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.direct_send import DirectSend, FirstAttempt, Told
from downrange.client.errors import (
    BrokerNotFound,
    ClientClosed,
    FailedAttempt,
    NoNameServer,
    NoRoute,
    SendFailed,
    TooManySends,
)
from downrange.client.exchange import Exchange, results_of
from downrange.client.fault import Outcome, QueueChooser, strategy
from downrange.client.hooks import SendHook
from downrange.client.messages import (
    Outgoing,
    batches,
    check_batch,
    check_producer_group,
    check_topic,
    outgoing,
)
from downrange.client.namespace import wrap
from downrange.client.probing import run_probes
from downrange.client.publish_info import PublishInfo, publish_info, route_from_model
from downrange.client.request_reply import REQUEST_SECONDS, Reply, ReplyMessage, Requests, as_reply
from downrange.client.retry import (
    Decision,
    SendKind,
    after_async_attempt,
    after_attempt,
    attempt_timeout,
    attempts_allowed,
    outcome_of_error,
)
from downrange.client.send_result import SendResult, SendStatus
from downrange.client.session import Session
from downrange.client.trace_writer import MAX_TRACE_BYTES, TraceWriter
from downrange.client.unique_id import UniqueIds
from downrange.model.errors import MQError
from downrange.model.hashing import java_hash
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError

log = logging.getLogger(__name__)

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""Picks the queue of an ordered message out of all that may be written, whose order is the same for every producer."""
SendCallback = Callable[[SendResult | None, MQError | None], None]
"""Called once: with a result, or with the error."""

_YIELD_BYTES: Final = 64 * 1024
_REMEMBERED: Final = 10_000  # topics


class AsyncProducer:
    """Sends messages for one producer group, on one event loop.

    `async with AsyncProducer("group", "host:9876") as producer: await producer.send(Message("topic", b"body"))`.
    Holds always: a send that returns was acknowledged by a broker; one that raises MessageError sent nothing; every
    other error is a SendFailed that lists the attempts, or says that no route was found. After `close` no task of the
    producer is left. A session that was passed in is not closed: several producers and consumers may share it.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ProducerConfig | None = None,
        *,
        session: Session | None = None,
        hooks: Iterable[SendHook] = (),
        random_source: random.Random | None = None,
    ) -> None:
        check_producer_group(group)
        self.config = config or ProducerConfig()
        self.group = wrap(self.config.namespace, group)
        self._owns_session = session is None
        self.session = session or Session(namesrv if isinstance(namesrv, ClientConfig) else ClientConfig.of(namesrv))
        self._clock = self.session.clock
        self._hooks = list(hooks)
        self.chooser = QueueChooser(strategy(self.config.fault_strategy), random_source)
        self._ids = UniqueIds(self._clock)
        self._infos: dict[str, PublishInfo] = {}
        self._wire_topics: dict[str, str] = {}
        self._exchange: Exchange  # made by start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._forks = 0
        self._is_open = False
        self._is_closed = False
        self._on_their_way = 0
        self._all_done: asyncio.Future[None] | None = None
        self._sends: set[asyncio.Task[SendResult]] = set()
        self._prober: asyncio.Task[None] | None = None
        self._trace: TraceWriter | None = None
        self._requests = Requests(self.session)
        self._oneway_bytes = 0

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<AsyncProducer {self.group} {state} on_their_way={self._on_their_way} {self.chooser!r}>"

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Announce the group and begin the work in the background. Needs no server: routes are found when sending."""
        if self._loop is not None:
            raise ClientClosed(f"the producer {self.group} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._forks = forks.count
        self._exchange = Exchange(self.group, self.session, self.config, self._hooks, self._loop)
        self._is_open = True
        self.session.start()
        self.session.heartbeats.add_producer(self.group)
        if self.config.trace:
            self._trace = await start_trace(self.session, self.group, "PRODUCE", self.config.trace_topic)
            self._hooks.append(self._trace)
        if self.chooser.strategy.name == "adaptive":
            self._prober = asyncio.create_task(
                run_probes(self.chooser, self.session, lambda: self._infos.values()), name="downrange probes"
            )
        return self

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no further sends and wait for those on their way; whether all ended in time."""
        self._is_open = False
        if self._on_their_way:
            if self._all_done is None:
                self._all_done = asyncio.get_running_loop().create_future()
            seconds = self.config.close_timeout_seconds if timeout is None else timeout
            await asyncio.wait([self._all_done], timeout=seconds)
        return not self._on_their_way

    async def close(self, timeout: float | None = None) -> None:
        """Drain, leave the group, close what was opened. Sends that did not end in time fail."""
        if self._loop is None or self._is_closed:
            return
        self._is_closed = True
        try:
            await self.drain(timeout)
        finally:  # also when nobody wants to wait any longer
            await self._requests.close()
            for task in [*self._sends, *([self._prober] if self._prober else [])]:
                task.cancel()
                await asyncio.wait([task])
            if self._trace is not None:
                await self._trace.close()
            await self.session.heartbeats.remove_producer(self.group)
            if self._owns_session:
                await self.session.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- sending --------------------------------------------------------------------------------------------------

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Send and wait until a broker has it; on failure another broker is tried, all within `timeout` seconds.

        A message with a sharding key, or sent with a `queue` or a `selector`, goes to that queue or nowhere.
        """
        self._begin()
        try:
            ready = self._ready(message)
            return (await self._deliver(ready, SendKind.SYNC, queue, selector, timeout))[0]
        finally:
            self._end()

    def send_directly(
        self,
        message: Message,
        told: Told,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float | None = None,
    ) -> DirectSend:
        """`send` for a thread that waits: called on the loop, tells `told` the result there. Costs half of a task."""
        self._begin()
        try:
            direct = DirectSend(self, self._ready(message), told)
            direct.begin(queue, selector, timeout)
        except BaseException:
            self._end()
            raise
        return direct

    def send_async(
        self,
        message: Message,
        callback: SendCallback | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float | None = None,
    ) -> asyncio.Future[SendResult]:
        """Send in the background. The result is the future's, and the callback's if one is given.

        As in RocketMQ only failures of the connection are retried, on the same broker; a broker's refusal is final.
        """
        if len(self._sends) >= self.config.max_async_sends:
            raise TooManySends(
                f"{len(self._sends)} asynchronous sends are on their way, max_async_sends is "
                f"{self.config.max_async_sends}: wait for some of them"
            )
        self._begin()
        try:
            ready = self._ready(message)
            assert self._loop is not None
            task = self._loop.create_task(self._deliver_one(ready, queue, selector, timeout))
        except BaseException:
            self._end()
            raise
        self._sends.add(task)
        task.add_done_callback(self._async_ended)
        if callback is not None:
            task.add_done_callback(lambda done: _call_back(callback, done))
        return task

    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | None = None, selector: Selector | None = None
    ) -> None:
        """Send once and do not wait for an answer: fast, and nobody will know if it is lost."""
        self._begin()
        try:
            ready = self._ready(message)
            await self._deliver(ready, SendKind.ONEWAY, queue, selector, None)
            # Without an answer to wait for, a loop of sends would never let the event loop write them.
            self._oneway_bytes += len(ready.body) + len(ready.properties)
            if self._oneway_bytes > _YIELD_BYTES:
                self._oneway_bytes = 0
                await asyncio.sleep(0)
        finally:
            self._end()

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout: float | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic, few requests for many messages; one result for each, in order.

        What exceeds `max_message_size` goes in several requests, one after the other, `timeout` for each. When one
        fails, the SendFailed carries the results of those before it as `stored`.
        """
        self._begin()
        try:
            members = list(messages)
            topic = self._wire_topic(check_batch(members))
            # All are checked before the first is sent.
            requests = list(batches(members, self._ids.next, self.config, topic))
            results: list[SendResult] = []
            for ready in requests:
                try:
                    results += await self._deliver(ready, SendKind.SYNC, queue, None, timeout)
                except SendFailed as error:
                    error.stored = tuple(results)
                    raise
            return results
        finally:
            self._end()

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float = REQUEST_SECONDS,
    ) -> Reply:
        """Send a request and wait until whoever consumes it has replied, all within `timeout` seconds.

        Raises ReplyTimedOut; the request may have been carried out all the same, or be carried out later.
        """
        self._begin()
        try:
            ready = self._ready(message)
            info = self._known_info(ready.topic)
            if info is None:
                info = await self._info(ready.topic, self._clock.monotonic() + timeout)

            async def send(properties: str, seconds: float) -> object:
                full = ready._replace(properties=ready.properties + properties)
                return await self._deliver(full, SendKind.SYNC, queue, selector, seconds)

            return await self._requests.ask(message.topic, info.route, send, timeout)
        finally:
            self._end()

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be written, in the order selectors see them."""
        self._begin()
        try:
            info = await self._info(self._wire_topic(topic), self._clock.monotonic() + self.config.send_timeout_seconds)
        finally:
            self._end()
        return tuple(MessageQueue(topic, name, queue_id) for _, name, queue_id in info.queues)

    # --- one send -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._is_open:
            state = "not started" if self._loop is None else "closed"
            raise ClientClosed(f"the producer {self.group} is {state}")
        assert self._loop is not None
        if self._thread != threading.get_ident() or not self._loop.is_running() or self._forks != forks.count:
            raise ClientClosed(f"the producer {self.group} was started on another event loop, or before a fork")
        self._on_their_way += 1

    def _end(self) -> None:
        self._on_their_way -= 1
        if not self._on_their_way and self._all_done is not None and not self._all_done.done():
            self._all_done.set_result(None)

    def _async_ended(self, task: asyncio.Task[SendResult]) -> None:
        self._sends.discard(task)
        self._end()

    def _ready(self, message: Message) -> Outgoing:
        topic = self._wire_topics.get(message.topic) or self._wire_topic(message.topic)
        ready = outgoing(message, self._ids.next(), self.config, topic)
        return as_reply(ready, message) if isinstance(message, ReplyMessage) else ready

    def _wire_topic(self, topic: str) -> str:
        """The checked name with its namespace. Remembered: the check costs as much as encoding a small message."""
        known = self._wire_topics.get(topic)
        if known is None:
            check_topic(topic)
            known = wrap(self.config.namespace, topic)
            check_topic(known)
            if len(self._wire_topics) >= _REMEMBERED:
                self._wire_topics.clear()
            self._wire_topics[topic] = known
        return known

    async def _deliver_one(
        self, ready: Outgoing, queue: MessageQueue | None, selector: Selector | None, timeout: float | None
    ) -> SendResult:
        return (await self._deliver(ready, SendKind.ASYNC, queue, selector, timeout))[0]

    async def _deliver(
        self,
        ready: Outgoing,
        kind: SendKind,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
        first: FirstAttempt | None = None,
    ) -> Sequence[SendResult]:
        """All attempts of one request; `client/retry.py` decides what follows each. `first` may be under way."""
        config = self.config
        clock = self._clock
        if first is not None:
            kind, info, deadline, begun = first.kind, first.info, first.deadline, first.begun
            started = begun
            chosen: MessageQueue | None = first.queue
        else:
            begun = started = clock.monotonic()
            deadline = started + (config.send_timeout_seconds if timeout is None else timeout)
            known = self._known_info(ready.topic)
            if known is None:
                known = await self._info(ready.topic, deadline)
                begun = clock.monotonic()
            info = known
            chosen = self._given_queue(ready, info, queue, selector)
            if chosen is not None and kind is SendKind.SYNC:
                kind = SendKind.SYNC_GIVEN_QUEUE
        if chosen is not None and kind is not SendKind.SYNC and chosen.broker_name not in info.addresses:
            info = await self._refreshed(info, deadline)
            begun = clock.monotonic()
        failures: list[FailedAttempt] = []
        unsafe: Sequence[SendResult] = ()
        last_broker: str | None = None
        number = 0
        while True:
            number += 1
            if chosen is None:
                chosen = self.chooser.choose(info.queues, begun * 1000, last_broker)
            results: Sequence[SendResult] = ()
            error: MQError | None = None
            try:
                if first is not None and first.reply is not None:
                    asked: Awaitable[Command | None] = first.reply
                    first = None
                else:
                    seconds = attempt_timeout(begun, deadline, config.attempt_timeout_seconds)
                    address = info.addresses.get(chosen.broker_name)
                    if address is None:
                        raise BrokerNotFound(
                            f"the route of {ready.topic} names no master of broker {chosen.broker_name}"
                        )
                    asked = self._exchange.reply(ready, kind, chosen, address, seconds)
                reply = await asked
                if reply is not None:
                    results, _ = results_of(reply, ready, chosen)
                outcome = Outcome.OK if not results or results[0].status is SendStatus.SEND_OK else Outcome.NOT_STORE_OK
            except MQError as problem:
                error = problem
                outcome = outcome_of_error(problem)
            except asyncio.CancelledError:
                now = clock.monotonic()
                self.chooser.attempt_ended(now * 1000, chosen.broker_name, (now - begun) * 1000, Outcome.INTERRUPTED)
                self._exchange.forget_given_up(info.addresses.get(chosen.broker_name, ""))
                raise
            now = clock.monotonic()
            cost_millis = (now - begun) * 1000
            if kind is not SendKind.ONEWAY or error is not None:
                self.chooser.attempt_ended(now * 1000, chosen.broker_name, cost_millis, outcome)
            if outcome is Outcome.OK:
                return results
            begun = now  # of the next attempt, if there is one
            if error is not None:
                failures.append(FailedAttempt(chosen, cost_millis, error))
            unsafe = results or unsafe
            decision = self._what_next(kind, number, outcome, error, now, deadline, has_result=bool(unsafe))
            if error is not None:
                self.session.refresh_soon(ready.topic)
            if decision is Decision.RETURN:
                return unsafe
            if decision is Decision.RAISE:
                raise SendFailed(ready.topic, tuple(failures), (now - started) * 1000) from error
            last_broker = chosen.broker_name
            info = self._known_info(ready.topic) or info
            if decision is Decision.RETRY:
                chosen = None

    def _what_next(
        self,
        kind: SendKind,
        number: int,
        outcome: Outcome,
        error: MQError | None,
        now: float,
        deadline: float,
        *,
        has_result: bool,
    ) -> Decision:
        config = self.config
        allowed = attempts_allowed(kind, config.retry_times_when_send_failed, config.retry_times_when_send_async_failed)
        if kind is SendKind.ASYNC:
            return after_async_attempt(number, allowed, outcome, now, deadline)
        return after_attempt(
            number,
            allowed,
            outcome,
            error.code if isinstance(error, BrokerError) else None,
            now,
            deadline,
            config.retry_another_broker_when_not_store_ok,
            has_result=has_result,
        )

    # --- where to -------------------------------------------------------------------------------------------------

    def _known_info(self, topic: str) -> PublishInfo | None:
        info = self._infos.get(topic)
        return info if info is not None and self.session.known_route(topic) is info.route else None

    async def _info(self, topic: str, deadline: float) -> PublishInfo:
        """The queues of `topic`; asks a name server unless a usable route is known."""
        route = self.session.known_route(topic) if topic in self._infos else None
        if route is not None:
            try:
                return self._remember(topic, route)
            except NoRoute as error:
                log.info("route looked up again topic=%s reason=%s", topic, error)
        left = deadline - self._clock.monotonic()
        try:
            async with asyncio.timeout(left):
                return self._remember(topic, await self.session.follow(topic, self._model_route))
        except TimeoutError:
            raise NoNameServer(
                f"no route of {topic} within the time of the send; name server {self.session.namesrv} does not answer"
            ) from None

    async def _refreshed(self, info: PublishInfo, deadline: float) -> PublishInfo:
        """The wanted broker has no address as far as we know: look again before giving up."""
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                return self._remember(info.topic, await self.session.follow(info.topic, self._model_route))
        except (MQError, TimeoutError) as error:
            log.info("route not refreshed topic=%s reason=%s", info.topic, error)
            return info

    def _remember(self, topic: str, route: TopicRouteData) -> PublishInfo:
        info = self._infos[topic] = publish_info(topic, route)
        return info

    async def _model_route(self) -> TopicRouteData:
        """What to go on with when a topic does not exist: brokers make it with the first message."""
        model = await self.session.look_up_route(self.config.create_topic_key)
        return route_from_model(model, self.config.default_topic_queue_nums)

    def _given_queue(
        self, ready: Outgoing, info: PublishInfo, queue: MessageQueue | None, selector: Selector | None
    ) -> MessageQueue | None:
        """The one queue this message must go to, if the caller or its sharding key says so."""
        message = ready.messages[0]
        if queue is not None:
            return MessageQueue(ready.topic, queue.broker_name, queue.queue_id)
        if selector is not None:
            chosen = selector([each._replace(topic=message.topic) for each in info.queues], message)
            return MessageQueue(ready.topic, chosen.broker_name, chosen.queue_id)
        if message.sharding_key:
            return info.queues[abs(java_hash(message.sharding_key)) % len(info.queues)]
        return None


def _call_back(callback: SendCallback, task: asyncio.Task[SendResult]) -> None:
    if task.cancelled():
        callback(None, ClientClosed("the send was given up: the producer was closed or the task cancelled"))
        return
    error = task.exception()
    if error is None:
        callback(task.result(), None)
    elif isinstance(error, MQError):
        callback(None, error)


_trace_numbers = itertools.count(1)


async def start_trace(session: Session, group: str, what: Literal["PRODUCE", "CONSUME"], topic: str) -> TraceWriter:
    """A producer of its own for traces: what goes wrong there must not touch the messages."""
    name = f"_INNER_TRACE_PRODUCER-{group[:200]}-{what}-{next(_trace_numbers)}"
    config = ProducerConfig(send_timeout_seconds=5.0, max_message_size=MAX_TRACE_BYTES)
    inner = AsyncProducer(name, config=config, session=session)
    await inner.start()
    return TraceWriter(inner.send, inner.close, session.clock, topic)
