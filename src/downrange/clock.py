"""Time as an argument, so that a test can stop it.

`now()` is wall-clock milliseconds since 1970, the time that travels and is stored; `monotonic()` is seconds that never
go back, for measuring.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when told; those who sleep on it wake in the order of their times."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._now = float(now)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._counter = 0

    def now(self) -> int:
        return int(self._now)

    def monotonic(self) -> float:
        return self._now / 1000

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counter += 1
        heapq.heappush(self._sleepers, (self._now + seconds * 1000, self._counter, future))
        await future

    @property
    def sleeping(self) -> list[float]:
        """In how many seconds each of those who sleep wakes: who advances too early wakes nobody."""
        return [(due - self._now) / 1000 for due, _, future in sorted(self._sleepers) if not future.done()]

    def set(self, now: int) -> None:
        """Jump without waking anybody: a clock that was set by hand, also backwards."""
        self._now = float(now)

    def tick(self, seconds: float) -> None:
        """Move on and wake at once everybody whose time has come."""
        self._now += seconds * 1000
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    async def advance(self, seconds: float) -> None:
        """Move on in the order of the sleepers' times, letting each run before the next wakes."""
        target = self._now + seconds * 1000
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now = max(self._now, self._sleepers[0][0])
            self.tick(0)
            for _ in range(5):
                await asyncio.sleep(0)
        self._now = target
        await asyncio.sleep(0)
