"""The way of every request through a broker: frames, runs of one family, admission, family.

A peer may send a thousand requests at once, and some requests take a millisecond. So each connection has a slice of a
turn of the loop, and what is left then waits for a later turn: peers that ask for little are not kept waiting by one
that asks for much.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import thread_time
from typing import Final, Protocol

from downrange.broker.admission import Admission
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, code_of, next_run
from downrange.transport.connection import Connection
from downrange.transport.serving import room_until, turn_away

SLICE_SECONDS: Final = 0.001
"""The processor's time for the requests of one connection in one turn of the loop, after the first run of them."""
TURN_SECONDS: Final = 0.005
"""The time for the slices of all connections that were read together. Later ones have their first run only."""


class Family(Protocol):
    """Requests that are answered together."""

    @property
    def codes(self) -> frozenset[int]: ...

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        """Answer the requests `frames[at:stop]`, now or later; `frames[n]` came over `origins[n]`."""


class RequestPath:
    """Cuts the frames that came into runs of one family, lets each run pass admission, and hands it to its family.

    Holds always: no request reaches a family that admission has not let pass; requests of one connection are taken in
    the order they came.
    """

    def __init__(self, admission: Admission, commands: Family, *families: Family) -> None:
        """`commands` takes all codes that none of the families has."""
        self._admission = admission
        self._commands = commands
        self._families: dict[int, Family] = {code: family for family in families for code in family.codes}
        self._waiting: deque[Connection] = deque()

    def serve(self, frames: list[Frame], origins: list[Connection]) -> None:
        """Answer frames that came over one or many connections: the `Serve` of a broker's servers."""
        at, count = 0, len(frames)
        last: Connection | None = None
        began = since = 0.0
        while at < count:
            if origins[at].is_full:  # since this call began: its peer broke the protocol, or has had its slice
                stop = at + 1
                while stop < count and origins[stop] is origins[at]:
                    stop += 1
                origins[at].defer(*frames[at:stop])
                at = stop
                continue
            if at:
                now = thread_time()
                if origins[at] is not last:
                    last, since, began = origins[at], now, began or now
                elif now - since > SLICE_SECONDS or now - began > TURN_SECONDS:
                    self._hold_back(frames[at], origins[at])
                    at += 1
                    continue
            try:
                family: Family | None
                family, stop = next_run(frames, at, self._families)
                if stop == at:
                    family, stop = self._families.get(code_of(frames[at])), at + 1
            except RemoteProtocolError as error:
                origins[at].break_off(error)
                at += 1
                continue
            family = family or self._commands
            if at:
                stop = room_until(origins, at, stop)
            while at < stop:
                passed, refusal = self._admission.admitted(frames, origins, at, stop)
                if passed > at:
                    family.take(frames, origins, at, passed)
                if refusal is not None:
                    turn_away(refusal, frames[passed], origins[passed])
                    passed += 1
                    stop = room_until(origins, passed, stop)  # its connection may have to wait, or has ended
                at = passed

    def _hold_back(self, frame: Frame, origin: Connection) -> None:
        """Keep a request, and with it all that follow over its connection, for a later turn of the loop."""
        origin.hold_back(frame, None)
        self._waiting.append(origin)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Let the connection go on that has waited longest; the others after what comes in the meantime."""
        self._waiting[0].go_on()  # which may put it at the end
        self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)
