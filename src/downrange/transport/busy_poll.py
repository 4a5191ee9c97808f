"""Wait for a lone caller's next request without sleeping.

A caller that sends one request at a time waits most of all for two processors to wake up: the server's when the request
comes, and its own when the reply comes. The next request comes soon, so the server's loop turns a little longer instead
of sleeping. That saves the first of the two, half of the round trip.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Final

ALIKE: Final = 8
"""After so many chunks in a row with one request each, all from one connection, its peer counts as a lone caller."""
FIRST_REST_SECONDS: Final = 0.002
LONGEST_REST_SECONDS: Final = 1.0
"""After polling in vain there is a rest; each rest in a row is twice as long as the one before."""


class BusyPoll:
    """Keeps a loop turning for a few microseconds after each reply to a lone caller.

    Holds always: the loop turns only after a request was answered, and not while several connections are active; a
    caller that is slower than the polling soon costs no more than one poll every LONGEST_REST_SECONDS.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, time: Callable[[], float] = perf_counter
    ) -> None:
        self._call_soon = loop.call_soon
        self._seconds = seconds
        self._time = time  # the clock of the loop has a resolution of a millisecond
        self._caller: object = None
        self._alike = 0
        self._rest = FIRST_REST_SECONDS
        self._polls_until = 0.0
        self._rests_until = 0.0
        self.is_polling = False
        self.looks: list[Callable[[], object]] = []
        """Called in each turn; each looks for received bytes without waiting for the loop to report them."""

    def answered(self, caller: object, requests: int) -> None:
        """So many requests came at once, the last of them from this connection, and their replies were just sent."""
        if caller is not self._caller or requests != 1:
            self._caller = caller
            self._alike = 0
            return
        self._alike += 1
        if self._alike < ALIKE:
            return
        now = self._time()
        if self.is_polling:
            self._rest = FIRST_REST_SECONDS
        elif now < self._rests_until:
            return
        else:
            self.is_polling = True
            self._call_soon(self._turn)
        self._polls_until = now + self._seconds

    def _turn(self) -> None:
        if not self._alike:  # another connection is active, and would be kept waiting
            self.is_polling = False
        elif (now := self._time()) < self._polls_until:
            self._call_soon(self._turn)
            for look in self.looks:
                look()
        else:
            self.is_polling = False
            self._rests_until = now + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST_SECONDS)
