"""Which replicas are alive, by their heartbeats and connections. Pure: takes the time as an argument, sends nothing.

    heartbeat ──▶ alive until its timeout ──▶ silent
       │  ▲
       ▼  │ another heartbeat, or the probe finds the broker
    connection closed: suspected ──▶ probe: the broker cannot be reached ──▶ gone

Every controller keeps such a table, because brokers send their heartbeats to all. It decides only when to elect, never
whether a message is safe.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from downrange.controller.election import LOWEST_PRIORITY, UNKNOWN, Standing
from downrange.protocol.bodies.members import BrokerHeartbeatRequest

DEFAULT_TIMEOUT_MILLIS: Final = 10_000
MOST_TIMEOUT_MILLIS: Final = 600_000
PROBE_SECONDS: Final = 0.5
MOST_REPLICAS: Final = 10_000


class ReplicaKey(NamedTuple):
    """One replica of a broker set."""

    broker_name: str
    broker_id: int


@dataclass(slots=True)
class Heard:
    """The last heartbeat of a replica; times are seconds of a monotonic clock."""

    at: float
    timeout_seconds: float = DEFAULT_TIMEOUT_MILLIS / 1000
    standing: Standing = UNKNOWN
    connection: Hashable = None
    address: str = ""
    confirm_offset: int = -1
    is_gone: bool = False
    """Whether the connection was closed and a probe found nobody since then."""


class Liveness:
    """The heartbeats of all replicas that one controller heard of."""

    def __init__(self) -> None:
        self._heard: dict[ReplicaKey, Heard] = {}
        self._leases: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Liveness replicas={len(self._heard)}>"

    def heartbeat(self, key: ReplicaKey, heard: Heard) -> bool:
        """Note a heartbeat; True if the replica was not known or had been given up."""
        before = self._heard.get(key)
        self._heard[key] = heard
        return before is None or before.is_gone or not self._is_alive(before, heard.at)

    def asked(self, key: ReplicaKey, heard: Heard) -> None:
        """A broker asked something for itself, so it is alive; its heartbeats may begin later."""
        if not self.is_full(key) and not self.is_alive(key, heard.at):
            self._heard[key] = heard

    def is_alive(self, key: ReplicaKey, now: float) -> bool:
        heard = self._heard.get(key)
        return heard is not None and self._is_alive(heard, now)

    def alive(self, broker_name: str, ids: Iterable[int], now: float) -> frozenset[int]:
        """The ids of one set whose replicas are alive."""
        return frozenset(id_ for id_ in ids if self.is_alive(ReplicaKey(broker_name, id_), now))

    def standings(self, broker_name: str, ids: Iterable[int]) -> dict[int, Standing]:
        """The last words of replicas about their logs."""
        found = ((id_, self._heard.get(ReplicaKey(broker_name, id_))) for id_ in ids)
        return {id_: heard.standing for id_, heard in found if heard is not None}

    def closed(self, connection: Hashable) -> list[ReplicaKey]:
        """The replicas whose last heartbeat came over a connection that was closed: they should be probed."""
        return [key for key, heard in self._heard.items() if heard.connection == connection and not heard.is_gone]

    def not_found(self, key: ReplicaKey, connection: Hashable) -> bool:
        """A probe found nobody: the replica is gone, unless it was heard again over another connection."""
        heard = self._heard.get(key)
        if heard is None or heard.connection != connection:
            return False
        heard.is_gone = True
        return True

    def address(self, key: ReplicaKey) -> str | None:
        """Where a replica is, as its heartbeats tell."""
        heard = self._heard.get(key)
        return heard.address if heard is not None and heard.address else None

    def is_full(self, key: ReplicaKey) -> bool:
        """Whether there is no room for one more replica: requests of strangers must not fill the memory."""
        return key not in self._heard and len(self._heard) >= MOST_REPLICAS

    def forget(self, key: ReplicaKey) -> None:
        self._heard.pop(key, None)

    def take_office(self, replicas: Iterable[ReplicaKey], now: float) -> None:
        """This controller leads from now on: every replica counts as heard now, but those that it found gone.

        Its own table may be empty, or be old because nobody could reach it: both are no reason to elect.
        """
        for key in replicas:
            heard = self._heard.setdefault(key, Heard(now))
            if not heard.is_gone:
                heard.at = max(heard.at, now)

    def excuse(self, now: float) -> None:
        """This process stood still: that it heard nothing says nothing about others."""
        for heard in self._heard.values():
            heard.at = max(heard.at, now)

    # --- leases of masters --------------------------------------------------------------------------------------

    def lease(self, broker_name: str, until: float) -> None:
        """A master was told that it stays master until then."""
        self._leases[broker_name] = max(until, self._leases.get(broker_name, until))

    def leased_until(self, broker_name: str) -> float:
        return self._leases.get(broker_name, float("-inf"))

    @staticmethod
    def _is_alive(heard: Heard, now: float) -> bool:
        return not heard.is_gone and heard.at + heard.timeout_seconds >= now


def heard_of(header: BrokerHeartbeatRequest, connection: Hashable, at: float) -> Heard:
    """A heartbeat; a broker that names no timeout, or a senseless one, gets the default."""
    millis = header.heartbeat_timeout_mills
    if millis is None or millis <= 0:
        millis = DEFAULT_TIMEOUT_MILLIS
    standing = Standing(
        -1 if header.epoch is None else header.epoch,
        -1 if header.max_offset is None else header.max_offset,
        LOWEST_PRIORITY if header.election_priority is None else header.election_priority,
    )
    confirmed = -1 if header.confirm_offset is None else header.confirm_offset
    return Heard(at, min(millis, MOST_TIMEOUT_MILLIS) / 1000, standing, connection, header.broker_addr, confirmed)
