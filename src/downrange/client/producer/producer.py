"""The producer for code with an event loop. The way of a send is in delivery.py."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterable
from threading import get_ident
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

from msgspec import structs

from downrange.client import forks
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import BrokerNotFound, ClientClosed, SendFailed
from downrange.client.namespace import wrap
from downrange.client.producer.async_sends import AsyncSends, SendCallback
from downrange.client.producer.delivery import Delivery
from downrange.client.producer.fault import Outcome, QueueChooser, strategy
from downrange.client.producer.hooks import SendHook
from downrange.client.producer.many_sends import ManySends
from downrange.client.producer.outgoing import InvalidHandle, check_producer_group
from downrange.client.producer.preparation import Preparation
from downrange.client.producer.probing import run_probes
from downrange.client.producer.publish_routes import PublishRoutes
from downrange.client.producer.request_reply import REQUEST_SECONDS, Reply, Requests
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_requests import SendRequests
from downrange.client.producer.send_result import SendResult, SendStatistics
from downrange.client.producer.started_send import Selector, StartedSend
from downrange.client.session import Session
from downrange.client.trace_writer import MAX_TRACE_BYTES, TraceWriter
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.model.recall_handle import RecallHandle
from downrange.protocol.bodies.timer import RecallMessageRequest, RecallMessageResponse
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request

T = TypeVar("T")
_YIELD_BYTES: Final = 64 * 1024
_ONEWAY_EXTRA_BYTES: Final = 128  # for properties


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
        self.session = session or Session(ClientConfig.of(namesrv))
        self._clock = self.session.clock
        self._hooks = list(hooks)
        self.chooser = QueueChooser(strategy(self.config.fault_strategy), random_source)
        self._preparation = Preparation(self.config, self._clock)
        self.ready = self._preparation.ready
        """The message as it goes out; raises MessageError. Any thread may call."""
        self.routes = PublishRoutes(self.session, self.config)
        self.delivery: Delivery  # made by start
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_running: Callable[[], bool]  # of the loop
        self._thread = 0
        self._forks = 0
        self._is_open = False
        self._is_closed = False
        self._on_their_way = 0
        self._all_done: asyncio.Future[None] | None = None
        self._async_sends = AsyncSends(self)
        self.tasks: set[asyncio.Task[Any]] = set()
        """Sends that make further attempts in the background."""
        self._prober: asyncio.Task[None] | None = None
        self._trace: TraceWriter | None = None
        self._requests = Requests(self.session)
        self._oneway_bytes = 0

    def __repr__(self) -> str:
        state = "open" if self._is_open else "closed"
        return f"<AsyncProducer {self.group} {state} on_their_way={self._on_their_way} {self.chooser!r}>"

    @property
    def statistics(self) -> SendStatistics:
        """How many attempts failed, were given up or may be duplicates, since the producer was started."""
        return structs.replace(self.delivery.statistics) if self._loop is not None else SendStatistics()

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Announce the group and begin the work in the background. Needs no server: routes are found when sending."""
        if self._loop is not None:
            raise ClientClosed(f"the producer {self.group} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        self._is_running = self._loop.is_running
        self._thread = get_ident()
        self._forks = forks.count
        self.session.start()
        self.session.heartbeats.add_producer(self.group)
        if self.config.trace:
            self._trace = await start_trace(self.session, self.group, "PRODUCE", self.config.trace_topic)
            self._hooks.append(self._trace)
        requests = SendRequests(self.group, self.session, self.config, self._hooks, self._loop)
        self.delivery = Delivery(self.session, self.config, self.chooser, self.routes, requests, self._preparation)
        self._is_open = True
        if self.chooser.strategy.name == "adaptive":
            self._prober = asyncio.create_task(
                run_probes(self.chooser, self.session, self.routes.all), name="downrange probes"
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
        """Drain, leave the group, and close the session unless it was given. Sends that did not end in time fail."""
        if self._loop is None or self._is_closed:
            return
        self._is_closed = True
        try:
            await self.drain(timeout)
        finally:  # also when the wait was cancelled
            await self._requests.close()
            for ended in [*self._async_sends, *self.tasks, *([self._prober] if self._prober else [])]:
                ended.cancel()
                await asyncio.wait([ended])
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
        """Send and wait until a broker has the message. Others are tried after a failure, all within `timeout` seconds.

        A message with a sharding key, or sent with a `queue` or a `selector`, goes to that queue or nowhere.
        """
        self.count_in()
        try:
            delivery = self.delivery
            aim = delivery.aim(message, queue, selector, timeout)
            if aim is None:
                return (await delivery.deliver(self.ready(message), SendKind.SYNC, queue, selector, timeout))[0]
            asked = delivery.new_future()
            ready = delivery.ask(aim, asked)
            ended: Command | MQError | None = None
            if ready is not None:
                try:
                    reply = await asked
                    if isinstance(reply, SendResult):  # nearly every send ends here
                        if delivery.learns:
                            delivery.learn(aim[3], aim[4])
                        return reply
                    ended = reply
                except MQError as error:
                    ended = error
                except asyncio.CancelledError:
                    delivery.learn(aim[3], aim[4], Outcome.INTERRUPTED)
                    delivery.requests.forget_given_up(aim[3].address)
                    raise
            return (await delivery.go_on(StartedSend(*aim, ready, ended)))[0]
        finally:
            self._on_their_way -= 1  # `count_out`, for every send
            if self._all_done is not None:
                self._tell_drain()

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
        return self._async_sends.begin(message, callback, queue, selector, timeout)

    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | None = None, selector: Selector | None = None
    ) -> None:
        """Send once and do not wait for an answer: fast, but the loss of a message goes unnoticed."""
        self.count_in()
        try:
            aim = self.delivery.aim(message, queue, selector, None, SendKind.ONEWAY)
            if aim is None:
                await self.delivery.deliver(self.ready(message), SendKind.ONEWAY, queue, selector, None)
            elif not self.delivery.tell(aim):
                await self.delivery.go_on(StartedSend(*aim))
            # Without an answer to wait for, a loop of sends would never let the event loop write them.
            self._oneway_bytes += len(message.body) + _ONEWAY_EXTRA_BYTES
            if self._oneway_bytes > _YIELD_BYTES:
                self._oneway_bytes = 0
                await asyncio.sleep(0)
        finally:
            self.count_out()

    async def send_all(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[SendResult | MQError]:
        """Send messages side by side, each as `send` would: the result or error of each, in their order.

        An error of one message does not keep back the others. Takes half the time of as many coroutines. No more than a
        thousand are on their way at once, `timeout` for each. Messages of one sharding key are sent in their order.
        """
        self.count_in()
        try:
            return await ManySends(self, timeout).send(messages)
        finally:
            self.count_out()

    async def send_batch(
        self,
        messages: Iterable[Message],
        *,
        queue: MessageQueue | None = None,
        timeout: float | None = None,
    ) -> list[SendResult]:
        """Send messages of one topic, few requests for many messages; one result for each, in order.

        More than `max_message_size` goes in several requests, one after the other, `timeout` for each.
        When one fails, the SendFailed carries the results of the requests before it as `stored`.
        """
        self.count_in()
        try:
            requests = self._preparation.ready_batch(tuple(messages))  # all are checked before the first is sent
            results: list[SendResult] = []
            for ready in requests:
                try:
                    results += await self.delivery.deliver(ready, SendKind.SYNC, queue, None, timeout)
                except SendFailed as error:
                    error.stored = tuple(results)
                    raise
            return results
        finally:
            self.count_out()

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float = REQUEST_SECONDS,
    ) -> Reply:
        """Send a request and wait for the reply of its consumer, all within `timeout` seconds.

        Raises ReplyTimedOut; the request may still have been carried out, or be carried out later.
        """
        self.count_in()
        try:
            ready = self.ready(message)
            info = self.routes.known(ready.topic)
            if info is None:
                info = await self.routes.find(ready.topic, self._clock.monotonic() + timeout)

            async def send(properties: str, seconds: float) -> object:
                full = structs.replace(ready, properties=ready.properties + properties)
                return await self.delivery.deliver(full, SendKind.SYNC, queue, selector, seconds)

            return await self._requests.ask(message.topic, info.route, send, timeout)
        finally:
            self.count_out()

    async def recall(self, handle: str, *, timeout: float | None = None) -> str:
        """Recall a timer message that is not due yet; `handle` is the `recall_handle` of its result. Returns its id.

        Raises BrokerError when the broker does not recall: its time is over, or `recallMessageEnable` is off. Whether
        the message was recalled before is not told. In the last tick before its time it may come all the same.
        """
        self.count_in()
        try:
            parts = RecallHandle.decode(handle)
            if parts is None:
                raise InvalidHandle(f"{handle!r} is no recall handle; a SendResult has one if its message is timed")
            seconds = self.config.send_timeout_seconds if timeout is None else timeout
            info = await self.routes.find(parts.topic, self._clock.monotonic() + seconds)
            address = info.addresses.get(parts.broker_name)
            if address is None:
                raise BrokerNotFound(f"broker {parts.broker_name}, which has the message, has no master at the moment")
            header = RecallMessageRequest(
                topic=parts.topic, recall_handle=handle, producer_group=self.group, bname=parts.broker_name
            )
            reply = await self.session.invoke(address, request(RequestCode.RECALL_MESSAGE, header), seconds)
            return reply.header(RecallMessageResponse).msg_id
        finally:
            self.count_out()

    async def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be written, in the order selectors see them."""
        self.count_in()
        try:
            deadline = self._clock.monotonic() + self.config.send_timeout_seconds
            info = await self.routes.find(self._preparation.wire_topic(topic), deadline)
        finally:
            self.count_out()
        return tuple(MessageQueue(topic, name, queue_id) for _, name, queue_id in info.queues)

    # --- one send -------------------------------------------------------------------------------------------------

    def count_in(self) -> None:
        """Count a send as on its way until `count_out`; raises ClientClosed. On the loop's thread."""
        if not self._is_open:
            state = "not started" if self._loop is None else "closed"
            raise ClientClosed(f"the producer {self.group} is {state}")
        if self._thread != get_ident() or not self._is_running() or self._forks != forks.count:
            raise ClientClosed(f"the producer {self.group} was started on another event loop, or before a fork")
        self._on_their_way += 1

    def count_out(self) -> None:
        """A send is over: it no longer counts as one that waits."""
        self._on_their_way -= 1
        if self._all_done is not None:
            self._tell_drain()

    def _tell_drain(self) -> None:
        if not self._on_their_way and self._all_done is not None and not self._all_done.done():
            self._all_done.set_result(None)

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that ends with the producer. On the loop's thread."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


_trace_numbers = itertools.count(1)


async def start_trace(session: Session, group: str, what: Literal["PRODUCE", "CONSUME"], topic: str) -> TraceWriter:
    """Start a trace writer with a producer of its own, so that its errors do not touch the user's messages."""
    name = f"_INNER_TRACE_PRODUCER-{group[:200]}-{what}-{next(_trace_numbers)}"
    config = ProducerConfig(send_timeout_seconds=5.0, max_message_size=MAX_TRACE_BYTES)
    inner = AsyncProducer(name, config=config, session=session)
    await inner.start()
    return TraceWriter(inner.send, inner.close, session.clock, topic)
