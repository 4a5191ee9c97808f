"""A send for a thread that waits: without a task while all goes well."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol

from downrange.client.exchange import results_of
from downrange.client.fault import Outcome
from downrange.client.messages import Outgoing
from downrange.client.publish_info import PublishInfo
from downrange.client.retry import SendKind, attempt_timeout
from downrange.client.send_result import SendResult
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Command

if TYPE_CHECKING:
    from downrange.client.producer import AsyncProducer, Selector

_SUCCESS: Final = int(ResponseCode.SUCCESS)


class Told(Protocol):
    """Whoever is told how a send ended, once."""

    def set_result(self, result: SendResult, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


class FirstAttempt:
    """A send as far as it was begun without a task: what was chosen, and the reply if there is one already."""

    __slots__ = ("begun", "deadline", "info", "kind", "queue", "reply")

    def __init__(self, kind: SendKind, info: PublishInfo, queue: MessageQueue, begun: float, deadline: float) -> None:
        self.kind = kind
        self.info = info
        self.queue = queue
        self.begun = begun
        self.deadline = deadline
        self.reply: asyncio.Future[Command] | None = None


class DirectSend:
    """Takes the reply to the first attempt, in the place of a future. A part of AsyncProducer, used by it only.

    A reply that says stored becomes the result in the very call that received it; a task would take more turns of the
    loop, each of which costs a waiting thread as much as everything else. Whatever else happens, a task goes on.
    Holds always: the producer counts the send as on its way until just before `told` is told.
    """

    __slots__ = ("_first", "_is_done", "_producer", "_ready", "_task", "_told")

    def __init__(self, producer: AsyncProducer, ready: Outgoing, told: Told) -> None:
        self._producer = producer
        self._ready = ready
        self._told = told
        self._first: FirstAttempt | None = None
        self._is_done = False
        self._task: asyncio.Task[None] | None = None

    def begin(self, queue: MessageQueue | None, selector: Selector | None, timeout: float | None) -> None:
        """Send, at once if that takes no waiting."""
        producer, ready = self._producer, self._ready
        info = producer._known_info(ready.topic)
        if info is not None:
            begun = producer._clock.monotonic()
            deadline = begun + (producer.config.send_timeout_seconds if timeout is None else timeout)
            given = producer._given_queue(ready, info, queue, selector)
            kind = SendKind.SYNC if given is None else SendKind.SYNC_GIVEN_QUEUE
            chosen = given or producer.chooser.choose(info.queues, begun * 1000)
            address = info.addresses.get(chosen.broker_name)
            self._first = FirstAttempt(kind, info, chosen, begun, deadline)
            seconds = attempt_timeout(begun, deadline, producer.config.attempt_timeout_seconds)
            try:
                if address is not None and producer._exchange.ask_now(ready, chosen, address, self, seconds):
                    return
            except MQError as error:  # a frame too large, a connection just closed: an attempt that failed
                self.set_exception(error)
                return
        self._task = asyncio.get_running_loop().create_task(self._deliver(queue, selector, timeout))

    async def _deliver(self, queue: MessageQueue | None, selector: Selector | None, timeout: float | None) -> None:
        try:
            try:
                (result,) = await self._producer._deliver(
                    self._ready, SendKind.SYNC, queue, selector, timeout, self._first
                )
            finally:
                self._producer._end()
        except BaseException as error:  # cancelled, too: the thread must not wait for ever
            self._told.set_exception(error)
        else:
            self._told.set_result(result)

    def cancel(self) -> None:
        """The thread does not wait any longer."""
        if self._task is not None:
            self._task.cancel()
        elif not self._is_done:
            self._ended(Outcome.INTERRUPTED)
            assert self._first is not None
            self._producer._exchange.forget_given_up(self._first.info.addresses[self._first.queue.broker_name])

    # --- as who waits for a reply; see transport/outstanding.py --------------------------------------------------

    def done(self) -> bool:
        return self._is_done

    def set_result(self, reply: Command, /) -> None:
        assert self._first is not None
        if reply.code != _SUCCESS:
            self._go_on().set_result(reply)
            return
        try:
            (result,), _ = results_of(reply, self._ready, self._first.queue)
        except MQError as error:  # a reply that cannot be read
            self.set_exception(error)
            return
        self._ended(Outcome.OK)
        self._told.set_result(result)

    def set_exception(self, error: BaseException, /) -> None:
        self._go_on().set_exception(error)

    def _ended(self, outcome: Outcome) -> None:
        assert self._first is not None
        self._is_done = True
        begun, now = self._first.begun, self._producer._clock.monotonic()
        self._producer.chooser.attempt_ended(now * 1000, self._first.queue.broker_name, (now - begun) * 1000, outcome)
        self._producer._end()

    def _go_on(self) -> asyncio.Future[Command]:
        """Leave the rest to a task; the future takes what came of the first attempt."""
        assert self._first is not None
        self._is_done = True
        loop = asyncio.get_running_loop()
        self._first.reply = loop.create_future()
        # Queue, selector and time-out have become what was chosen.
        self._task = loop.create_task(self._deliver(None, None, None))
        return self._first.reply
