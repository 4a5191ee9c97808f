"""Messages that are sent side by side, each on its own, without a coroutine for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from downrange.client.errors import ClientClosed
from downrange.client.producer.fault import Outcome
from downrange.client.producer.first_attempt import FirstAttempt
from downrange.client.producer.messages import Outgoing
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.protocol.command import Command

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer

MOST: Final = 1_000
"""How many of them are on their way at the same time: more would fill memory, and be no faster."""


class OneOfMany:
    """One message on its way. Takes the reply to its first attempt, in the place of a future.

    Holds always: it stands among the results where its own will be, until it has one or nobody wants it any more.
    """

    __slots__ = ("_position", "_sends", "first", "is_answered")

    def __init__(self, sends: ManySends, position: int) -> None:
        self._sends = sends
        self._position = position
        self.is_answered = False
        self.first: FirstAttempt | None = None

    def end(self, result: SendResult | MQError) -> None:
        sends = self._sends
        sends.results[self._position] = result
        sends.left -= 1
        if sends.left == sends.awaited:
            sends.wake()

    # --- as who waits for a reply; see transport/outstanding.py --------------------------------------------------

    def done(self) -> bool:
        return self.is_answered

    def set_result(self, reply: Command | SendResult, /) -> None:
        self.is_answered = True
        sends = self._sends
        if not isinstance(reply, SendResult):
            sends.go_on(self, reply)
            return
        if sends.learns:
            sends.learn(self, Outcome.OK)
        sends.results[self._position] = reply  # `end`, for nearly all
        sends.left -= 1
        if sends.left == sends.awaited:
            sends.wake()

    def set_exception(self, error: BaseException, /) -> None:
        assert isinstance(error, MQError), error
        self.is_answered = True
        self._sends.go_on(self, error)


class ManySends:
    """The sends of one call of `send_all`. Used on the producer's loop.

    Nearly every message is stored by its first attempt: then the reply becomes its result in the very call that
    received it. For any other a task goes on at once, as if it had been sent alone.
    Holds always: no more than `MOST` are on their way; `results` has one place for each that was begun, in their order.
    """

    def __init__(self, producer: AsyncProducer, timeout: float | None) -> None:
        self.results: list[SendResult | MQError | OneOfMany | None] = []
        self.left = 0
        """How many are on their way."""
        self.awaited = -1
        """How few `send` waits for."""
        self.learns = producer.chooser.learns
        self._few: asyncio.Future[None] | None = None
        self._tasks: dict[OneOfMany, asyncio.Task[Sequence[SendResult]]] = {}
        self._producer = producer
        self._timeout = timeout

    async def send(self, messages: Iterable[Message]) -> list[SendResult | MQError]:
        """What became of each; raises what `messages` raises, or when nobody waits any longer."""
        results = self.results
        begin = self._producer.delivery.begin
        timeout = self._timeout
        try:
            for message in messages:
                if self.left >= MOST:
                    await self._until(MOST // 2)
                one = OneOfMany(self, len(results))
                results.append(one)
                self.left += 1
                try:
                    first = one.first = begin(message, None, None, timeout, one)
                    if first is None or first.is_unasked:
                        task = self._deliver(one, self._producer.ready(message) if first is None else first.ready)
                        if message.sharding_key:  # the next of its key must not overtake it
                            await asyncio.wait([task])
                except MQError as error:  # of the message
                    one.end(error)
            if self.left:
                await self._until(0)
        except BaseException:
            self._give_up()
            raise
        return results  # type: ignore[return-value]  # none is on its way

    def learn(self, one: OneOfMany, outcome: Outcome) -> None:
        if one.first is not None:
            self._producer.delivery.ended(one.first, outcome)

    def go_on(self, one: OneOfMany, ended: Command | MQError) -> None:
        """The first attempt was made, and has not ended well."""
        assert one.first is not None
        one.first.ended = ended
        self._deliver(one, one.first.ready)

    def _deliver(self, one: OneOfMany, ready: Outgoing) -> asyncio.Task[Sequence[SendResult]]:
        def ended(task: asyncio.Task[Sequence[SendResult]]) -> None:
            del self._tasks[one]
            if task.cancelled():
                one.end(ClientClosed("the send was given up: the producer was closed"))
            elif isinstance(error := task.exception(), MQError):
                one.end(error)
            else:
                one.end(task.result()[0])

        one.is_answered = True
        deliver = self._producer.delivery.all(ready, SendKind.SYNC, None, None, self._timeout, one.first)
        task = self._tasks[one] = self._producer.background(deliver)
        task.add_done_callback(ended)
        return task

    # --- waiting --------------------------------------------------------------------------------------------------

    async def _until(self, few: int) -> None:
        """Wait until no more than so many are on their way."""
        self.awaited = few
        self._few = asyncio.get_running_loop().create_future()
        await self._few

    def wake(self) -> None:
        self.awaited = -1
        if self._few is not None and not self._few.done():
            self._few.set_result(None)

    def _give_up(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()
        addresses: set[str | None] = set()
        for one in self.results:
            if isinstance(one, OneOfMany) and not one.is_answered:
                one.is_answered = True
                self.learn(one, Outcome.INTERRUPTED)
                if one.first is not None:
                    addresses.add(one.first.address)
        for address in addresses:
            self._producer.delivery.exchange.forget_given_up(address)
