"""Those who wait until a connection takes another request."""

from __future__ import annotations

import asyncio
from collections import deque

from downrange.transport.errors import RequestTimedOut


class RoomWaiters:
    """Coroutines that wait for room, woken first come, first served; each looks for itself whether there is some.

    Holds always: who is here was not told yet, was cancelled, or waited in vain. Used by its connection only.
    """

    __slots__ = ("_loop", "peer", "waiters")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = "?"
        self._loop = loop
        self.waiters: deque[asyncio.Future[None]] = deque()

    async def wait(self, deadline: float, code: int) -> None:
        """Wait to be woken; RequestTimedOut when that took too long for a request of this code."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self.waiters.append(waiter)
        timer = self._loop.call_at(deadline, self._give_up, waiter, code)
        try:
            await waiter
        finally:
            timer.cancel()

    def _give_up(self, waiter: asyncio.Future[None], code: int) -> None:
        if not waiter.done():
            waiter.set_exception(RequestTimedOut(f"{self.peer} takes no more data: request {code} was not sent"))

    def wake(self) -> bool:
        """Wake the one that has waited the longest; False when there is none."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False
