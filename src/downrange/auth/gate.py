"""The gate of a server with access control: the `Guard` decides, the audit log hears of it, and guessing is slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from downrange.auth.audit import AuditLog
from downrange.auth.guard import Guard, Origin, Outcome, address_of
from downrange.auth.login_failures import LoginFailures
from downrange.clock import Clock
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.protocol.framing import Frame

MOST_REFUSALS_IN_A_ROW: Final = 20
WAIT_SECONDS: Final = 1.0
_NOT_LOOKED_AT: Final = NoPermission("too many failed logins from this address, wait a moment")


class Refusal(NamedTuple):
    """Why a request is not carried out, and what happens to its connection."""

    error: BrokerError
    wait_seconds: float = 0.0
    """If not 0: there is no answer yet, the request must be offered again after so many seconds."""
    ends_connection: bool = False


class _Peer:
    """A connection with refused requests."""

    __slots__ = ("has_waited", "refused_in_a_row")

    def __init__(self) -> None:
        self.refused_in_a_row = 0
        self.has_waited = False
        """Whether the next attempt need not wait; a failed login ends that."""


class Gate:
    """Lets requests pass, one run of them at a time. Requests that repeat and pass cost one compiled step.

    Connections without a refused request are not known here; `forget` must be called for every one that ends.
    """

    def __init__(
        self,
        make_guard: Callable[[Callable[[Outcome], None]], Guard],
        audit: AuditLog,
        clock: Clock,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`make_guard` makes the guard from the function that hears of its outcomes.

        Attempts from an address with too many failed logins wait `wait_seconds`; 0 lets them go on at once.
        """
        self._guard = make_guard(self._note)
        self._audit = audit
        self._now = clock.monotonic
        self._wait_seconds = wait_seconds
        self.failures = LoginFailures()
        """The failed logins of this server, on all its ports."""
        self._peers: dict[Origin, _Peer] = {}
        self.denied = 0
        """Requests of known accounts without the right."""
        self._ended = 0

    def __repr__(self) -> str:
        return f"<Gate {self.failures!r} denied={self.denied} peers={len(self._peers)}>"

    def figures(self) -> Mapping[str, int]:
        """Refused requests by reason, and connections that ended for too many of them."""
        return {"login": self.failures.count, "permission": self.denied, "connection": self._ended}

    def admitted(
        self, frames: Sequence[Frame], origins: Sequence[Origin], at: int, stop: int
    ) -> tuple[int, Refusal | None]:
        """The position of the first request of `frames[at:stop]` that is refused, and why; `stop` and None for none."""
        guard = self._guard
        while True:
            passed = guard.passed(frames, origins, at, stop)
            if self._peers:
                for origin in set(origins[at:passed]):
                    self._reset(origin)
            if passed >= stop:
                return stop, None
            refusal = self._looked_at(frames[passed], origins[passed])
            if refusal is not None:
                return passed, refusal
            at = passed + 1

    def may_publish(self, origin: Origin, topic: str) -> bool:
        """Whether the account that sends the heartbeats of a connection may publish to a topic, as things are now."""
        return self._guard.may_publish(origin, topic)

    def forget(self, origin: Origin) -> None:
        """A connection has ended."""
        self._peers.pop(origin, None)

    def _looked_at(self, frame: Frame, origin: Origin) -> Refusal | None:
        if self._must_wait(origin):
            return Refusal(_NOT_LOOKED_AT, wait_seconds=self._wait_seconds)
        error = self._guard.refusal(frame, origin)
        if error is None:
            return None
        peer = self._peers.get(origin)
        if peer is None or peer.refused_in_a_row < MOST_REFUSALS_IN_A_ROW:
            return Refusal(error)
        self._ended += 1
        return Refusal(error, ends_connection=True)

    def _must_wait(self, origin: Origin) -> bool:
        """Whether the next attempt of a connection must wait first; asked again, after the wait, it need not."""
        if not self.failures or not self._wait_seconds:
            return False
        if not self.failures.is_in_debt(address_of(origin), self._now()):
            return False
        peer = self._peers.setdefault(origin, _Peer())
        if peer.has_waited:
            return False
        peer.has_waited = True
        return True

    def _reset(self, origin: Origin) -> None:
        peer = self._peers.get(origin)
        if peer is not None:
            peer.refused_in_a_row = 0

    def _note(self, outcome: Outcome) -> None:
        if outcome.refusal is None:
            self._reset(outcome.origin)
            self._audit.passed(outcome)
            return
        peer = self._peers.setdefault(outcome.origin, _Peer())
        peer.refused_in_a_row += 1
        if outcome.account is not None:
            self.denied += 1
            self._audit.refused(outcome)
            return
        peer.has_waited = False
        left_out = self.failures.failed(address_of(outcome.origin), self._now())
        if left_out is None:
            self._audit.left_out(outcome)
        else:
            self._audit.refused(outcome, left_out)
