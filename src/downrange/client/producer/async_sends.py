"""Sends whose callers go on at once, and are told later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from downrange.client.errors import ClientClosed, TooManySends
from downrange.client.producer.delivery import Selector
from downrange.client.producer.messages import Outgoing
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.waiting_send import FutureSend, WaitingSend
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer

SendCallback = Callable[[SendResult | None, MQError | None], None]
"""Called once: with a result, or with the error."""


class AsyncSends:
    """The asynchronous sends of one producer that are on their way. Used on its event loop.

    Holds always: there are never more than `max_async_sends`; the producer counts each until its future is done.
    """

    def __init__(self, producer: AsyncProducer) -> None:
        self._producer = producer
        self._most = producer.config.max_async_sends
        self._futures: set[asyncio.Future[SendResult]] = set()

    def __repr__(self) -> str:
        return f"<AsyncSends {len(self._futures)} of {self._most}>"

    def __iter__(self) -> Iterator[asyncio.Future[SendResult]]:
        return iter(self._futures)

    def begin(
        self,
        message: Message,
        callback: SendCallback | None,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
    ) -> asyncio.Future[SendResult]:
        """See `AsyncProducer.send_async`."""
        if len(self._futures) >= self._most:
            raise TooManySends(
                f"{len(self._futures)} asynchronous sends are on their way, max_async_sends is {self._most}: "
                "wait for some of them"
            )
        producer = self._producer
        producer.count_in()
        try:
            ready = producer.ready(message)
            sent: asyncio.Future[SendResult]
            waiting: WaitingSend | None = None
            # While others go on in the background this one must not overtake them.
            first = None if producer.tasks else producer.delivery.first(ready, queue, selector, timeout)
            if first is None:
                sent = producer.background(self._deliver(ready, queue, selector, timeout))
            else:
                first.kind = SendKind.ASYNC
                sent = producer.delivery.exchange.new_future()
                waiting = WaitingSend(producer, first, FutureSend(sent))
        except BaseException:
            producer.count_out()
            raise
        self._futures.add(sent)

        def ended(sent: asyncio.Future[SendResult]) -> None:
            self._futures.discard(sent)
            if waiting is not None and sent.cancelled():
                waiting.cancel()
            producer.count_out()
            if callback is not None:
                _call_back(callback, sent)

        sent.add_done_callback(ended)
        return sent

    async def _deliver(
        self, ready: Outgoing, queue: MessageQueue | None, selector: Selector | None, timeout: float | None
    ) -> SendResult:
        return (await self._producer.delivery.all(ready, SendKind.ASYNC, queue, selector, timeout))[0]


def _call_back(callback: SendCallback, sent: asyncio.Future[SendResult]) -> None:
    if sent.cancelled():
        callback(None, ClientClosed("the send was given up: the producer was closed or the task cancelled"))
        return
    error = sent.exception()
    if error is None:
        callback(sent.result(), None)
    elif isinstance(error, MQError):
        callback(None, error)
