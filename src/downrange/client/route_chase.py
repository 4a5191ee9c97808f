"""Routes that may have changed, because a broker failed or says that it is not the master: looked up again at once.

The first error asks the name server at once. While the route stays as it is, the pauses between two looks grow from
`FIRST_PAUSE_SECONDS` to `LONGEST_PAUSE_SECONDS`, and when that went on for `FAILOVER_SECONDS`, to `RARE_SECONDS`: many
clients whose broker is away for an hour must not be a load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from downrange.client.background_work import BackgroundWork
from downrange.clock import Clock

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 0.5
FAILOVER_SECONDS: Final = 10.0
RARE_SECONDS: Final = 2.0
FORGET_SECONDS: Final = 5.0
"""After so long without a look the next error is the first one again."""


class Pace(NamedTuple):
    """The first and the last look at a route, and how long to wait before the next one. Pure."""

    since: float
    looked_at: float
    pause_seconds: float

    @property
    def next_at(self) -> float:
        return self.looked_at + self.pause_seconds


def next_pace(pace: Pace | None, now: float) -> Pace:
    """The pace after a look that is made now."""
    if pace is None or now - pace.looked_at >= FORGET_SECONDS:
        return Pace(now, now, FIRST_PAUSE_SECONDS)
    longest = LONGEST_PAUSE_SECONDS if now - pace.since < FAILOVER_SECONDS else RARE_SECONDS
    return Pace(pace.since, now, min(2 * pace.pause_seconds, longest))


class RouteChase:
    """The looks at routes that errors ask for. Used on the session's event loop.

    Holds always: there is at most one look at a time for a topic; while somebody waits for its change there is one
    under way or to come.
    """

    def __init__(self, clock: Clock, work: BackgroundWork, look: Callable[[str], Awaitable[None]]) -> None:
        self._clock = clock
        self._work = work
        self._look = look
        self._paces: dict[str, Pace] = {}
        self._chased: set[str] = set()
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<RouteChase {sorted(self._chased)}>"

    def soon(self, topic: str) -> None:
        """Look at once, unless the last look was a moment ago."""
        pace = self._paces.get(topic)
        if topic not in self._chased and (pace is None or self._clock.monotonic() >= pace.next_at):
            self._begin(topic)

    def changed(self, topic: str) -> None:
        """Tell the sends that wait for another route that there is one."""
        self._paces.pop(topic, None)
        for waiter in self._waiting.pop(topic, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, topic: str, seconds: float) -> bool:
        """Wait for another route, at most so long; whether there is one. Looks for it meanwhile."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(topic, set())
        waiting.add(waiter)
        if topic not in self._chased:
            self._begin(topic)
        pause = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((waiter, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            waiting.discard(waiter)
        return waiter.done()

    def _begin(self, topic: str) -> None:
        self._chased.add(topic)
        self._work.start(self._chase(topic), f"route of {topic}")

    async def _chase(self, topic: str) -> None:
        """Look once, and again for as long as somebody waits."""
        try:
            while True:
                pace = self._paces.get(topic)
                now = self._clock.monotonic()
                if pace is not None and now < pace.next_at:
                    await self._clock.sleep(pace.next_at - now)
                self._paces[topic] = next_pace(self._paces.get(topic), self._clock.monotonic())
                await self._look(topic)
                if not self._waiting.get(topic):
                    return
        finally:
            self._chased.discard(topic)
