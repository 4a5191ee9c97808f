"""Sends whose callers go on at once: a future or a callback gets the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from downrange.client.errors import ClientClosed, TooManySends
from downrange.client.producer.pending_send import PendingSend
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.started_send import Selector
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer

SendCallback = Callable[[SendResult | None, MQError | None], None]
"""Called once: with the result and None, or with None and the error."""


class AsyncSends:
    """The asynchronous sends of one producer that are on their way. Used on its event loop.

    Holds always: there are never more than `max_async_sends`; the producer counts each send until its future is done.
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
        """Start a send in the background; raises TooManySends when `max_async_sends` are on their way."""
        if len(self._futures) >= self._most:
            raise TooManySends(
                f"{len(self._futures)} asynchronous sends are on their way, max_async_sends is {self._most}: "
                "wait for some of them"
            )
        producer = self._producer
        producer.count_in()
        try:
            sent: asyncio.Future[SendResult] = producer.delivery.requests.new_future()
            pending = PendingSend(producer, partial(_tell, sent))
            if producer.tasks:  # it must not overtake sends that go on in the background
                pending.deliver(message, SendKind.ASYNC, queue, selector, timeout)
            else:
                pending.begin(message, queue, selector, timeout, SendKind.ASYNC)
        except BaseException:
            producer.count_out()
            raise
        self._futures.add(sent)

        def ended(sent: asyncio.Future[SendResult]) -> None:
            self._futures.discard(sent)
            if sent.cancelled():
                pending.cancel()
            producer.count_out()
            if callback is not None:
                _call_back(callback, sent)

        sent.add_done_callback(ended)
        return sent


def _tell(sent: asyncio.Future[SendResult], _: PendingSend, result: SendResult | BaseException) -> None:
    if sent.done():
        return
    if isinstance(result, SendResult):
        sent.set_result(result)
    elif isinstance(result, asyncio.CancelledError):
        sent.cancel()
    else:
        sent.set_exception(result)


def _call_back(callback: SendCallback, sent: asyncio.Future[SendResult]) -> None:
    if sent.cancelled():
        callback(None, ClientClosed("the send was given up: the producer was closed or the task cancelled"))
        return
    error = sent.exception()
    if error is None:
        callback(sent.result(), None)
    elif isinstance(error, MQError):
        callback(None, error)
