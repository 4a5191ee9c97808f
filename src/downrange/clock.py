"""Clocks that are passed as arguments, so that a test can stop the time.

`now()` is wall-clock time in milliseconds since 1970, as messages carry it; `monotonic()` counts seconds and never goes
back, for measuring.
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


async def sleep_or_set(clock: Clock, seconds: float, event: asyncio.Event) -> None:
    """Sleep until the time is over or `event` is set. Either way it is set afterwards."""

    def ring(alarm: asyncio.Future[None]) -> None:
        if not alarm.cancelled():
            event.set()

    alarm = asyncio.ensure_future(clock.sleep(seconds))
    alarm.add_done_callback(ring)
    try:
        await event.wait()
    finally:
        alarm.cancel()


class SystemClock:
    """The machine's clock."""

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class BootClock(SystemClock):
    """The machine's clock; its monotonic time goes on while the machine is suspended, so that leases end then, too."""

    def monotonic(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class ManualClock:
    """A clock that moves only when told; tasks that sleep on it wake in the order of their times."""

    def __init__(self, now: int = 1_700_000_000_000) -> None:
        self._now = float(now)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._counter = 0

    def now(self) -> int:
        """Milliseconds since 1970."""
        return int(self._now)

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back unless it is set."""
        return self._now / 1000

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock was advanced so far."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._counter += 1
        heapq.heappush(self._sleepers, (self._now + seconds * 1000, self._counter, future))
        await future

    @property
    def sleeping(self) -> list[float]:
        """The seconds until each sleeping task wakes. A test waits for these before it advances the clock."""
        return [(due - self._now) / 1000 for due, _, future in sorted(self._sleepers) if not future.done()]

    def set(self, now: int) -> None:
        """Jump, also backwards, without waking a sleeping task: a clock that was set by hand."""
        self._now = float(now)

    def tick(self, seconds: float) -> None:
        """Move on and wake every task whose time has come."""
        self._now += seconds * 1000
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)

    async def advance(self, seconds: float) -> None:
        """Move on and wake the sleeping tasks in the order of their times, letting each run before the next wakes."""
        target = self._now + seconds * 1000
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now = max(self._now, self._sleepers[0][0])
            self.tick(0)
            for _ in range(5):
                await asyncio.sleep(0)
        self._now = target
        await asyncio.sleep(0)
