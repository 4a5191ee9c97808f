"""The requests of one connection that are outstanding: they wait for their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import Any, Final, Protocol

from downrange.transport.errors import RequestTimedOut

_CLOSE_ENOUGH: Final = 0.001  # seconds; timers of a loop are no finer


class Waiter(Protocol):
    """An object that waits for a reply: a future, or something cheaper."""

    def done(self) -> bool: ...

    def set_result(self, reply: Any, /) -> None: ...

    def set_exception(self, error: BaseException, /) -> None: ...


Asked = tuple[Waiter, float, int, float, Any]
"""One request: its waiter, deadline, code and time-out, and what the reply reader needs to make a result of the reply;
None when the waiter wants the reply itself, a Command. A plain tuple, because there is one for every send."""


class Outstanding:
    """Requests by opaque.

    Holds always: a waiter is told exactly once, unless it was cancelled before; the timer stands at the earliest
    deadline or before it. One timer serves all requests: deadlines mostly ascend, so it is moved about once in a
    time-out. `requests` is always the same dict. Used by its connection only.
    """

    __slots__ = ("_loop", "_on_room", "_time", "_timer", "peer", "requests", "timer_at")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_room: Callable[[], None]) -> None:
        """`on_room` is called for every request that ended without a reply."""
        self.peer = "?"
        self.requests: dict[int, Asked] = {}
        self._loop = loop
        self._time = loop.time
        self._on_room = on_room
        self._timer: asyncio.TimerHandle | None = None
        self.timer_at = inf

    def add(self, opaque: int, waiter: Waiter, code: int, timeout: float, expected: Any = None) -> None:
        deadline = self._time() + timeout
        self.requests[opaque] = (waiter, deadline, code, timeout, expected)
        if deadline < self.timer_at:
            self.set_timer(deadline)

    def forget_given_up(self) -> None:
        """Remove the requests whose waiter was cancelled."""
        for opaque in [opaque for opaque, request in self.requests.items() if request[0].done()]:
            del self.requests[opaque]
            self._on_room()

    def fail_all(self, make_error: Callable[[], BaseException]) -> None:
        """Tell all waiters that the connection is closed."""
        requests = list(self.requests.values())
        self.requests.clear()
        self.set_timer(inf)
        for waiter, *_ in requests:
            if not waiter.done():
                waiter.set_exception(make_error())

    def set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.timer_at = deadline
        self._timer = None if deadline == inf else self._loop.call_at(deadline, self._time_out)

    def _time_out(self) -> None:
        late = self._loop.time() + _CLOSE_ENOUGH
        for opaque in [opaque for opaque, request in self.requests.items() if request[1] <= late]:
            waiter, _, code, timeout, _ = self.requests.pop(opaque)
            if not waiter.done():
                problem = f"{self.peer} did not answer request {code} within {timeout:.3g} s"
                waiter.set_exception(RequestTimedOut(problem))
            self._on_room()
        self.set_timer(min((request[1] for request in self.requests.values()), default=inf))
