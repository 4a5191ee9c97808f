"""A send on the event loop for a thread or a callback that waits: without a task while all goes well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from downrange.client.producer.fault import Outcome
from downrange.client.producer.first_attempt import FirstAttempt
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.model.errors import MQError
from downrange.protocol.command import Command

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer


class Told(Protocol):
    """Whoever wants to know what became of a send: the call of a thread, or a FutureSend."""

    def set_result(self, result: SendResult, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class FutureSend:
    """Tells a future, unless it was cancelled."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[SendResult]) -> None:
        self._future = future

    def set_result(self, result: SendResult, /) -> None:
        if not self._future.done():
            self._future.set_result(result)

    def set_exception(self, error: BaseException, /) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._future.cancel()
        elif not self._future.done():
            self._future.set_exception(error)


class WaitingSend:
    """Takes the reply to the first attempt, in the place of a future. Used on the loop's thread.

    A reply that says stored becomes the result in the very call that received it; a task would take more turns of the
    loop. Whatever else happens, a task goes on.
    Holds always: somebody is told exactly once, unless `cancel` comes before a reply; until just before that the
    producer counts the send as on its way.
    """

    __slots__ = ("_first", "_is_done", "_producer", "_task", "_told")

    def __init__(self, producer: AsyncProducer, first: FirstAttempt, told: Told) -> None:
        """Begin, with the first attempt unless it was made elsewhere."""
        self._producer = producer
        self._first = first
        self._told = told
        self._is_done = False
        self._task: asyncio.Task[Sequence[SendResult]] | None = None
        producer.count_in()
        if first.ended is None:
            producer.delivery.ask(first, self)
        if first.ended is not None or first.is_unasked:
            self._go_on()

    def cancel(self) -> None:
        """Nobody waits any longer."""
        if self._task is not None:
            self._task.cancel()
        elif not self._is_done:
            self._end(Outcome.INTERRUPTED)
            self._producer.delivery.exchange.forget_given_up(self._first.address)

    # --- as who waits for a reply; see transport/outstanding.py --------------------------------------------------

    def done(self) -> bool:
        return self._is_done

    def set_result(self, reply: Command | SendResult, /) -> None:
        if isinstance(reply, SendResult):
            self._end(Outcome.OK)
            self._told.set_result(reply)
        else:
            self._first.ended = reply
            self._go_on()

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, MQError), error
        self._first.ended = error
        self._go_on()

    def _end(self, outcome: Outcome) -> None:
        self._is_done = True
        self._producer.delivery.ended(self._first, outcome)
        self._producer.count_out()

    def _go_on(self) -> None:
        self._is_done = True
        deliver = self._producer.delivery.all(self._first.ready, SendKind.SYNC, None, None, None, self._first)
        self._task = self._producer.background(deliver)
        # Not at the end of a coroutine around it: one that is cancelled before its first step never gets there.
        self._task.add_done_callback(self._delivered)

    def _delivered(self, task: asyncio.Task[Sequence[SendResult]]) -> None:
        self._producer.count_out()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._told.set_exception(error)
        else:
            self._told.set_result(task.result()[0])
