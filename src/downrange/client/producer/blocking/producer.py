"""The producer for code without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from downrange.client import background_loop, forks
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import ClientClosed, TooManySends
from downrange.client.producer.async_sends import SendCallback
from downrange.client.producer.blocking.direct_sends import DirectSends
from downrange.client.producer.hooks import SendHook
from downrange.client.producer.pending_send import PendingSend
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.request_reply import REQUEST_SECONDS, Reply
from downrange.client.producer.send_result import SendResult, SendStatistics
from downrange.client.producer.started_send import Selector, StartedSend
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue

T = TypeVar("T")

_inherited: Final[list[AsyncProducer]] = []  # producers of a parent process: never closed here, see background_loop.py


class Producer:
    """`AsyncProducer` with calls that wait: `with Producer("group", "host:9876") as producer: producer.send(…)`.

    All blocking clients of a process share one background thread, which ends with the last of them. Any number of
    threads may use one producer. After a fork the child's copy connects anew, with a client id of its own, when it is
    first used.
    """

    def __init__(
        self,
        group: str,
        namesrv: str | ClientConfig | None = None,
        config: ProducerConfig | None = None,
        *,
        hooks: Iterable[SendHook] = (),
    ) -> None:
        self.config = config or ProducerConfig()
        self._group = group
        self._client_config = ClientConfig.of(namesrv)
        self._hooks = tuple(hooks)
        self._reset()
        self._new()  # raises here for wrong arguments, not only in `start`

    def __repr__(self) -> str:
        return f"<Producer {self._producer!r}>" if self._producer else f"<Producer {self._group} not started>"

    def _reset(self) -> None:
        self._forks = forks.count
        self._background: background_loop.BackgroundLoop | None = None
        self._producer: AsyncProducer | None = None
        self._direct: DirectSends | None = None
        self._is_open = False
        self._opening = threading.Lock()
        self._room = threading.BoundedSemaphore(self.config.max_async_sends)

    @property
    def statistics(self) -> SendStatistics:
        """How many attempts failed, were given up or may be duplicates, since the producer was started."""
        return SendStatistics() if self._producer is None else self._producer.statistics

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to work; `with` does this. A producer starts once."""
        with self._opening:
            if self._background is not None:
                raise ClientClosed(f"the producer {self._group} was started before")
            background, producer = background_loop.open_client(self._open())
            self._direct = DirectSends(producer.session, producer.delivery)
            self._background, self._producer = background, producer
            self._is_open = True
        return self

    async def _open(self) -> AsyncProducer:
        return await self._new().start()

    def _new(self) -> AsyncProducer:
        return AsyncProducer(self._group, self._client_config, self.config, hooks=self._hooks)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no further sends and wait for those on their way; whether all ended in time."""
        background, producer = self._held()
        self._is_open = False
        return self._drain(background, producer, timeout)

    def _drain(
        self, background: background_loop.BackgroundLoop, producer: AsyncProducer, timeout: float | None
    ) -> bool:
        """Wait for the direct sends first: they may need the event loop in the end."""
        seconds = self.config.close_timeout_seconds if timeout is None else timeout
        until = monotonic() + seconds
        assert self._direct is not None
        is_done = self._direct.drain(seconds)
        return background.run(producer.drain(max(0.0, until - monotonic()))) and is_done

    def close(self, timeout: float | None = None) -> None:
        """Drain, leave the group, disconnect. The background thread ends with the last client of the process."""
        with self._opening:
            background, producer = self._background, self._producer
            if background is None or producer is None or self._forks != forks.count:
                return
            self._background = None
            self._is_open = False
            assert self._direct is not None
            try:
                self._drain(background, producer, timeout)
            finally:  # also when the wait was interrupted
                self._direct.close()
                background_loop.close_client(background, producer.close(0))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- sending --------------------------------------------------------------------------------------------------

    def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Send and wait until a broker has the message. Others are tried after a failure, all within `timeout` seconds.

        A message with a sharding key, or sent with a `queue` or a `selector`, goes to that queue or nowhere. Raises
        SendFailed when no broker took the message.
        """
        background, producer = self._running()
        background.refuse_its_own_thread()
        assert self._direct is not None
        delivery = producer.delivery
        aim = delivery.aim(message, queue, selector, timeout)
        if aim is None and delivery.requests.is_plain:
            # Only the route is for the loop's thread to find. The round robin over the queues is this thread's own.
            ready = producer.ready(message)
            clock = producer.session.clock
            until = clock.monotonic() + (self.config.send_timeout_seconds if timeout is None else timeout)
            background.run(producer.routes.find(ready.topic, until))
            aim = delivery.aim(message, queue, selector, max(0.0, until - clock.monotonic()))
        if aim is None:  # hooks to be run, a signature to be made
            return background.run(producer.send(message, queue=queue, selector=selector, timeout=timeout))
        started = StartedSend(*aim)
        return self._direct.send(started, partial(_go_on, background, producer, started))

    def send_async(
        self,
        message: Message,
        callback: SendCallback | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        timeout: float | None = None,
    ) -> concurrent.futures.Future[SendResult]:
        """Send in the background. The result is the future's, and the callback's if one is given.

        Waits for room when `max_async_sends` are on their way. As in RocketMQ only failures of the connection are
        retried, on the same broker; a refusal by a broker is final.

        The callback runs on the background thread and must not block it.
        """
        background, producer = self._running()
        seconds = self.config.send_timeout_seconds if timeout is None else timeout
        if not self._room.acquire(timeout=seconds):
            raise TooManySends(f"{self.config.max_async_sends} sends are on their way and none ended in {seconds:g} s")
        outside: concurrent.futures.Future[SendResult] = concurrent.futures.Future()

        def ended(inside: asyncio.Future[SendResult]) -> None:
            error = ClientClosed("the producer was closed") if inside.cancelled() else inside.exception()
            if not outside.cancelled():
                if error is not None:
                    outside.set_exception(error)
                else:
                    outside.set_result(inside.result())
            self._room.release()  # last: the thread that gets the room finds this send done

        def start() -> None:
            try:
                inside = producer.send_async(message, callback, queue=queue, selector=selector, timeout=timeout)
            except Exception as error:
                self._room.release()
                outside.set_exception(error)
            else:
                inside.add_done_callback(ended)

        try:
            background.call_soon(start)
        except ClientClosed:
            self._room.release()
            raise
        return outside

    def send_oneway(
        self, message: Message, *, queue: MessageQueue | None = None, selector: Selector | None = None
    ) -> None:
        """Send once and do not wait for an answer: fast, but the loss of a message goes unnoticed."""
        self._run(lambda producer: producer.send_oneway(message, queue=queue, selector=selector))

    def send_all(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[SendResult | MQError]:
        """Send messages side by side, each as `send` would, and wait for all: the result or error of each, in order.

        An error of one message does not keep back the others. No more than a thousand are on their way at once,
        `timeout` for each. Messages of one sharding key are sent in their order.
        """
        given = tuple(messages)  # here: iterating over them must not hold up the event loop
        return self._run(lambda producer: producer.send_all(given, timeout=timeout))

    def send_batch(
        self, messages: Iterable[Message], *, queue: MessageQueue | None = None, timeout: float | None = None
    ) -> list[SendResult]:
        """Send messages of one topic, few requests for many messages; one result for each, in order.

        More than `max_message_size` goes in several requests, one after the other, `timeout` for each. When one fails,
        the SendFailed carries the results of the requests before it as `stored`.
        """
        return self._run(lambda producer: producer.send_batch(messages, queue=queue, timeout=timeout))

    def request(
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
        return self._run(lambda producer: producer.request(message, queue=queue, selector=selector, timeout=timeout))

    def recall(self, handle: str, *, timeout: float | None = None) -> str:
        """Recall a timer message that is not due yet; `handle` is the `recall_handle` of its result. Returns its id.

        Raises BrokerError when the message is due already, or when `recallMessageEnable` is off. The broker does not
        tell whether the message was recalled before. In the last tick before its time it may come all the same.
        """
        return self._run(lambda producer: producer.recall(handle, timeout=timeout))

    def queues(self, topic: str) -> tuple[MessageQueue, ...]:
        """The queues of a topic that may be sent to."""
        return self._run(lambda producer: producer.queues(topic))

    # --- the loop behind it ---------------------------------------------------------------------------------------

    def _running(self) -> tuple[background_loop.BackgroundLoop, AsyncProducer]:
        held = self._held()
        if not self._is_open:
            raise ClientClosed(f"the producer {self._group} is closed")
        return held

    def _held(self) -> tuple[background_loop.BackgroundLoop, AsyncProducer]:
        """The loop and the producer on it, which may have been drained; raises ClientClosed."""
        if self._forks != forks.count:
            self._reopen()
        background, producer = self._background, self._producer
        if background is None or producer is None:
            state = "not started" if producer is None else "closed"
            raise ClientClosed(f"the producer {self._group} is {state}")
        return background, producer

    def _run(self, call: Callable[[AsyncProducer], Coroutine[Any, Any, T]]) -> T:
        background, producer = self._running()
        return background.run(call(producer))

    def _reopen(self) -> None:
        """Begin anew in the child of a fork: the connections, tasks and thread of the old producer are its parent's."""
        was_open = self._is_open
        if self._producer is not None:
            _inherited.append(self._producer)
        if self._direct is not None:
            self._direct.forget()
        self._reset()
        if was_open:
            self.start()


def _go_on(background: background_loop.BackgroundLoop, producer: AsyncProducer, started: StartedSend) -> SendResult:
    """Go on with a send on the event loop, and wait for its end."""

    def begin(waiting: background_loop.WaitingThread[SendResult]) -> PendingSend:
        def ended(_: PendingSend, result: SendResult | BaseException) -> None:
            producer.count_out()
            if isinstance(result, SendResult):
                waiting.set_result(result)
            else:
                waiting.set_exception(result)

        producer.count_in()
        send = PendingSend(producer, ended)
        send.go_on(started)
        return send

    return background.call(begin)
