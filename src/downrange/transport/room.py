"""Those who wait until a connection takes another request."""

from __future__ import annotations

import asyncio
from collections import deque


class RoomWaiters:
    """Coroutines that wait for room, woken first come, first served; each looks for itself whether there is some.

    Holds always: who is here was not told yet, was cancelled, or waited in vain. Used by its connection only.
    """

    __slots__ = ("_loop", "waiters")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiters: deque[asyncio.Future[bool]] = deque()

    async def wait(self, deadline: float) -> bool:
        """Wait to be woken; False when that took too long."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self.waiters.append(waiter)
        timer = self._loop.call_at(deadline, _tell, waiter, False)
        try:
            return await waiter
        finally:
            timer.cancel()

    def wake(self) -> bool:
        """Wake the one that has waited the longest; False when there is none."""
        while self.waiters:
            if _tell(self.waiters.popleft(), True):
                return True
        return False


def _tell(waiter: asyncio.Future[bool], is_woken: bool) -> bool:
    """Whether it could still be told."""
    if waiter.done():
        return False
    waiter.set_result(is_woken)
    return True
