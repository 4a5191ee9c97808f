"""The interface of a fault strategy: how a producer picks queues and keeps away from brokers that fail.

A strategy is a set of pure functions of (state, now, event). State goes in and comes out as a value, so a test or the
simulator can replay any history, and two producers can share a strategy object without sharing what they learned.
Times are milliseconds of any clock that does not go back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from downrange.client.producer.fault.attempt import Attempt
from downrange.model.message import MessageQueue

PROBE_TIMEOUT_MILLIS: Final = 1000.0
"""A probe that has no answer by then has failed."""

S = TypeVar("S")


class Choice(msgspec.Struct, Generic[S], frozen=True):
    """The queue to send to, the round-robin index it was found at, and the state after choosing."""

    queue: MessageQueue
    stands_at: int
    state: S


class FaultStrategy(Protocol[S]):
    """Which queue next, given what attempts and probes have shown. Implementations hold parameters only."""

    @property
    def name(self) -> str: ...

    def initial(self) -> S:
        """The state to begin with. A strategy that never learns has None."""

    def choose(
        self, state: S, queues: Sequence[MessageQueue], now_millis: float, last_broker: str | None, index: int
    ) -> Choice[S]:
        """One of `queues`, which must not be empty. `last_broker` is where the attempt before this one failed."""

    def learn(self, state: S, now_millis: float, attempt: Attempt) -> S:
        """The state after `attempt`, which ended now."""

    def calm_millis(self, state: S, now_millis: float) -> float:
        """While no answer takes longer, the choice is plain round robin, and it matters only how many there were.

        0: every attempt must be told, and every choice be asked for.
        """

    def probes(self, state: S, now_millis: float) -> tuple[str, ...]:
        """Brokers to probe now: ask each for something small and tell `probed`."""

    def next_probe_at(self, state: S) -> float | None:
        """When `probes` will have something to say; None while nothing waits to be probed."""

    def probed(self, state: S, now_millis: float, broker: str, ok: bool, latency_millis: float) -> S: ...

    def patience_millis(self, state: S, broker: str) -> float | None:
        """How long to wait for an answer of `broker` before another is asked, if there is time for that.

        None: the strategy learns no time-outs, and an attempt may take all the time that the send has left.
        """


class RocketMQStrategy(Generic[S]):
    """The part of the interface that RocketMQ's strategies do not use: they send no probes and learn no time-outs."""

    def calm_millis(self, state: S, now_millis: float) -> float:
        return 0.0

    def probes(self, state: S, now_millis: float) -> tuple[str, ...]:
        return ()

    def next_probe_at(self, state: S) -> float | None:
        return None

    def probed(self, state: S, now_millis: float, broker: str, ok: bool, latency_millis: float) -> S:
        return state

    def patience_millis(self, state: S, broker: str) -> float | None:
        return None
