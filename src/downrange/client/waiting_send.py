"""A send on the event loop for a thread that waits: without a task while all goes well."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from downrange.client.background_loop import Call
from downrange.client.delivery import FirstAttempt
from downrange.client.fault import Outcome
from downrange.client.messages import Outgoing
from downrange.client.retry import SendKind
from downrange.client.send_result import SendResult
from downrange.model.errors import MQError
from downrange.protocol.command import Command

if TYPE_CHECKING:
    from downrange.client.producer import AsyncProducer


class WaitingSend:
    """Takes the reply to the first attempt, in the place of a future. Used on the loop's thread.

    A reply that says stored becomes the result in the very call that received it; a task would take more turns of the
    loop. Whatever else happens, a task goes on.
    Holds always: the producer counts the send as on its way until just before the thread is told.
    """

    __slots__ = ("_call", "_first", "_is_done", "_producer", "_ready", "_task")

    def __init__(self, producer: AsyncProducer, ready: Outgoing, first: FirstAttempt, call: Call[SendResult]) -> None:
        """Begin, with the first attempt unless it was made elsewhere."""
        self._producer = producer
        self._ready = ready
        self._first = first
        self._call = call
        self._is_done = False
        self._task: asyncio.Task[None] | None = None
        producer.count_in()
        if first.ended is None:
            try:
                exchange = producer.delivery.exchange
                if exchange.ask_now(ready, first.queue, first.address, self, first.seconds):
                    return
            except MQError as error:  # a frame too large
                first.ended = error
        self._go_on()

    def cancel(self) -> None:
        """The thread does not wait any longer."""
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
            self._call.set_result(reply)
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
        self._task = asyncio.get_running_loop().create_task(self._deliver())

    async def _deliver(self) -> None:
        producer, first = self._producer, self._first
        try:
            try:
                (result,) = await producer.delivery.all(self._ready, SendKind.SYNC, None, None, None, first)
            finally:
                producer.count_out()
        except BaseException as error:  # cancelled, too: the thread must not wait for ever
            self._call.set_exception(error)
        else:
            self._call.set_result(result)
