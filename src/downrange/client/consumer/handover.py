"""From workers to `async for`: a message is done when the loop asks for the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import Answer, Later
from downrange.client.consumer.workers import NotConsumed


class _Handed:
    """One message on its way through a user's loop."""

    __slots__ = ("answer", "ended", "message")

    def __init__(self, message: ReceivedMessage) -> None:
        self.message = message
        self.answer: Answer = None
        self.ended: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()


class Handover:
    """The callback of a consumer that has none: `offer` ends when a loop over `messages` is through with the message.

    A loop that is left keeps nothing: its message is handed out again, or, when the consumer stops, not consumed.
    """

    def __init__(self) -> None:
        self._ready: deque[_Handed] = deque()
        self._in_hand: dict[tuple[object, int], _Handed] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_closed = False

    async def offer(self, message: ReceivedMessage) -> Answer:
        """Hand a message to a loop that iterates."""
        if self._is_closed:
            raise NotConsumed
        handed = _Handed(message)
        self._ready.append(handed)
        self._wake()
        return await handed.ended

    async def messages(self) -> AsyncGenerator[ReceivedMessage, None]:
        """One loop's messages. Several loops may run: each gets its share."""
        while True:
            handed = await self._next()
            if handed is None:
                return
            key = (handed.message.queue, handed.message.queue_offset)
            self._in_hand[key] = handed
            is_done = False
            try:
                yield handed.message
                is_done = True
            finally:
                del self._in_hand[key]
                if not is_done:
                    self._take_back(handed)
            if not handed.ended.done():
                handed.ended.set_result(handed.answer)

    async def _next(self) -> _Handed | None:
        while not self._is_closed:
            while self._ready:
                handed = self._ready.popleft()
                if not handed.ended.done():
                    return handed
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # pass it on: the message we were woken for is still there
                raise
        return None

    def later(self, message: ReceivedMessage, later: Later) -> None:
        """The loop is not able to handle the message it has now: deliver it again once the loop goes on."""
        handed = self._in_hand.get((message.queue, message.queue_offset))
        if handed is None:
            raise ValueError(f"{message} is not being consumed")
        handed.answer = later

    def close(self) -> None:
        """Hand out nothing more. Loops end when they ask for the next message; what they have is theirs until then."""
        self._is_closed = True
        while self._ready:
            self._not_consumed(self._ready.popleft())
        while self._waiting:
            self._wake()

    def _take_back(self, handed: _Handed) -> None:
        if self._is_closed:
            self._not_consumed(handed)
        else:
            handed.answer = None
            self._ready.appendleft(handed)
            self._wake()

    def _not_consumed(self, handed: _Handed) -> None:
        if not handed.ended.done():
            handed.ended.set_exception(NotConsumed())

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
