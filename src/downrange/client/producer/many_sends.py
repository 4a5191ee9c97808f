"""Messages that are sent side by side, each on its own, without a coroutine for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from downrange.client.errors import ClientClosed
from downrange.client.producer.pending_send import PendingSend
from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.model.errors import MQError
from downrange.model.message import Message

if TYPE_CHECKING:
    from downrange.client.producer.producer import AsyncProducer

MOST: Final = 1_000
"""How many messages of one call are on their way at the same time: more would fill memory, and be no faster."""


class ManySends:
    """The sends of one call of `send_all`. Used on the producer's loop.

    Holds always: no more than `MOST` are on their way; `_results` has an item for each that was begun, in their order:
    the PendingSend until it has ended.
    """

    def __init__(self, producer: AsyncProducer, timeout: float | None) -> None:
        self._results: list[SendResult | MQError | PendingSend] = []
        self._left = 0
        """How many are on their way."""
        self._awaited = -1
        """`_few` is done when so few are left."""
        self._few: asyncio.Future[None] | None = None
        self._producer = producer
        self._timeout = timeout

    async def send(self, messages: Iterable[Message]) -> list[SendResult | MQError]:
        """The result or error of each message; raises what iterating over `messages` raises."""
        results = self._results
        producer, timeout, ended, append = self._producer, self._timeout, self._ended, results.append
        delivery = producer.delivery
        number = 0
        try:
            for message in messages:
                if self._left >= MOST:
                    await self._until(MOST // 2)
                aim = delivery.aim(message, None, None, timeout)
                one = PendingSend(producer, ended, number, aim)
                number += 1
                append(one)
                self._left += 1
                try:
                    one.ready = None if aim is None else delivery.ask(aim, one)
                    if one.ready is None:
                        one.deliver(message, SendKind.SYNC, None, None, timeout)
                        if one.task is not None and message.sharding_key:  # the next of its key must not overtake it
                            await asyncio.wait([one.task])
                except MQError as error:  # of the message
                    self._ended(one, error)
            if self._left:
                await self._until(0)
        except BaseException:
            self._give_up()
            raise
        return results  # type: ignore[return-value]  # none is on its way

    def _ended(self, one: PendingSend, result: SendResult | BaseException) -> None:
        if isinstance(result, asyncio.CancelledError):
            result = ClientClosed("the send was given up: the producer was closed")
        self._results[one.number] = result  # type: ignore[assignment]  # any other error is a bug
        left = self._left = self._left - 1
        if left == self._awaited:
            self._awaited = -1
            if self._few is not None and not self._few.done():
                self._few.set_result(None)

    async def _until(self, few: int) -> None:
        """Wait until no more than `few` are on their way."""
        self._awaited = few
        self._few = asyncio.get_running_loop().create_future()
        await self._few

    def _give_up(self) -> None:
        sends = [one for one in self._results if isinstance(one, PendingSend)]
        addresses = {one.give_up() for one in sends}
        for one in sends:
            one.cancel()  # those that go on in tasks
        for address in addresses:
            self._producer.delivery.requests.forget_given_up(address)
