"""A send on the event loop whose caller is told of its end, without a task while all goes well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec import structs

from downrange.client.producer.fault import Outcome
from downrange.client.producer.outgoing import Outgoing
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.client.producer.started_send import Aim, Selector, StartedSend
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.command import Command

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer


class PendingSend(msgspec.Struct, eq=False):
    """One message on its way: the waiter for the reply to its first attempt. Used on the producer's event loop.

    A reply that says stored ends the send in the very call that received it; a task would take more turns of the loop.
    After any other reply or error a task makes further attempts.
    Holds always: once begun, `ended` is called exactly once, with the result or the error; after `cancel` that is a
    CancelledError.
    """

    producer: AsyncProducer
    ended: Callable[[PendingSend, SendResult | BaseException], None]
    number: int = 0
    """For `ended`, to tell one send from another."""
    aim: Aim | None = None
    ready: Outgoing | None = None
    task: asyncio.Task[Sequence[SendResult]] | None = None
    is_done: bool = False

    def begin(
        self,
        message: Message,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
        kind: SendKind = SendKind.SYNC,
    ) -> None:
        """Make the first attempt now if that takes no waiting, else in a task; raises MessageError."""
        delivery = self.producer.delivery
        aim = self.aim = delivery.aim(message, queue, selector, timeout, kind)
        self.ready = None if aim is None else delivery.ask(aim, self)
        if self.ready is None:
            self.deliver(message, kind, queue, selector, timeout)

    def deliver(
        self,
        message: Message,
        kind: SendKind,
        queue: MessageQueue | None,
        selector: Selector | None,
        timeout: float | None,
    ) -> None:
        """Make all attempts in a task, from `aim` on if there is one; raises MessageError."""
        delivery = self.producer.delivery
        if self.aim is None:
            self._run(delivery.deliver(self.producer.ready(message), kind, queue, selector, timeout))
        else:
            self._run(delivery.go_on(StartedSend(*self.aim, self.producer.ready(message))))

    def go_on(self, started: StartedSend) -> None:
        """Go on with a send that a thread has started: its first attempt has ended, or was not made."""
        self.aim = structs.astuple(started)[: len(get_args(Aim))]
        self.ready = None if started.ended is not None else self.producer.delivery.ask(self.aim, self)
        if self.ready is None:
            self._run(self.producer.delivery.go_on(started))

    def cancel(self) -> None:
        """End the send without a result."""
        if self.task is not None:
            self.task.cancel()
        elif not self.is_done:
            self.producer.delivery.requests.forget_given_up(self.give_up())
            self.ended(self, asyncio.CancelledError())

    def give_up(self) -> str | None:
        """Wait for no reply any longer, without a word to `ended`; returns the address of the broker that was asked."""
        if self.is_done or self.aim is None:
            return None
        self.is_done = True
        target, begun = self.aim[3], self.aim[4]
        self.producer.delivery.learn(target, begun, Outcome.INTERRUPTED)
        return target.address

    # --- the Waiter of transport/outstanding.py -------------------------------------------------------------------

    def done(self) -> bool:
        return self.is_done

    def set_result(self, reply: Command | SendResult, /) -> None:
        if not isinstance(reply, SendResult):
            self._retry(reply)
            return
        self.is_done = True
        delivery = self.producer.delivery
        if delivery.learns and self.aim is not None:
            delivery.learn(self.aim[3], self.aim[4])
        self.ended(self, reply)

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, MQError), error
        self._retry(error)

    # --- further attempts -----------------------------------------------------------------------------------------

    def _retry(self, ended: Command | MQError) -> None:
        assert self.aim is not None
        self._run(self.producer.delivery.go_on(StartedSend(*self.aim, self.ready, ended)))

    def _run(self, attempts: Coroutine[Any, Any, Sequence[SendResult]]) -> None:
        self.is_done = True
        self.task = self.producer.background(attempts)
        # Not at the end of a coroutine around it: one that is cancelled before its first step never gets there.
        self.task.add_done_callback(self._delivered)

    def _delivered(self, task: asyncio.Task[Sequence[SendResult]]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.ended(self, task.result()[0] if error is None else error)
