"""The way of every request through a broker: frames, runs of one family, admission, family."""

from __future__ import annotations

from typing import Protocol

from downrange.broker.admission import Admission
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, code_of, decode_frame, encode, next_run
from downrange.transport.connection import Connection
from downrange.transport.serving import error_reply, send_replies


class Family(Protocol):
    """Requests that are answered together."""

    @property
    def codes(self) -> frozenset[int]: ...

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> int:
        """Answer the requests `frames[at:stop]`, now or later; `frames[n]` came over `origins[n]`.

        Return the position of the first request that was not taken: `stop`, unless a connection was broken off.
        """


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

    def serve(self, frames: list[Frame], origins: list[Connection]) -> None:
        """Answer frames that came over one or many connections: the `Serve` of a broker's servers."""
        at, count = 0, len(frames)
        while at < count:
            try:
                family: Family | None
                family, stop = next_run(frames, at, self._families)
                if stop == at:
                    family, stop = self._families.get(code_of(frames[at])), at + 1
            except RemoteProtocolError as error:
                origins[at].break_off(error)
                at += 1
                continue
            if at:  # an earlier run may have filled or broken off a connection
                full = next((n for n in range(at, stop) if origins[n].is_full), stop)
                if full == at:
                    origins[at].defer(frames[at])
                    at += 1
                    continue
                stop = full
            at = self._pass(family or self._commands, frames, origins, at, stop)

    def _pass(self, family: Family, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> int:
        """Let the family take what admission lets pass; return the position of the first request not looked at."""
        while at < stop:
            passed = self._admission.admitted(frames, origins, at, stop)
            if passed > at:
                at = family.take(frames, origins, at, passed)
                if at < passed:
                    break
            if passed < stop:
                self._refuse(family, frames, origins, passed)
                at = passed + 1
        return at

    def _refuse(self, family: Family, frames: list[Frame], origins: list[Connection], at: int) -> None:
        origin = origins[at]
        error = self._admission.refusal(frames[at], origin)
        if error is None:  # there is room again, made by another thread
            family.take(frames, origins, at, at + 1)
            return
        try:
            command = decode_frame(frames[at])
        except RemoteProtocolError as broken:
            origin.break_off(broken)
            return
        if not command.flag:
            send_replies([origin], encode(error_reply(command, error)))
