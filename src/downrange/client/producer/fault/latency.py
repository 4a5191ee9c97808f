"""`latency`: RocketMQ 4.x with `sendLatencyFaultEnable=true`.

After every attempt the broker's latency is looked up in a table, and the broker is avoided for the time beside it:

    latency at least   50   100   550   1000   2000   3000   15000 ms
    avoided for         0     0    30     60    120    180     600 s

A failed attempt counts as 30 s of latency whatever it took, so a broker that fails is avoided for ten minutes. A queue
is chosen by walking once around from the next index to the first broker that is not avoided. When all are, the fault
table is put in order (available, latency, end of avoidance) and its better half is used in turn.

Two defects of Java releases are not repeated: up to 4.7.1 a retry took an available queue only if it was on the broker
that had just failed; up to 4.9.7 the last resort wrote broker and queue id into the queue object of the shared route.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from downrange.client.producer.fault.attempt import Attempt, Outcome
from downrange.client.producer.fault.strategy import Choice, RocketMQStrategy
from downrange.model.message import MessageQueue
from downrange.settings import ConfigError

ISOLATED_LATENCY_MILLIS: Final = 30_000.0
# An interrupted caller has seen no failure of the broker.
MEASURED: Final = frozenset({Outcome.OK, Outcome.NOT_STORE_OK, Outcome.INTERRUPTED})


class FaultItem(NamedTuple):
    """One row of the fault table: the last latency seen, and when the broker may be used again."""

    latency_millis: float
    available_at: float


class LatencyState(NamedTuple):
    """The fault table. `picks` counts last resorts; None until the first, which starts at the caller's index."""

    table: Mapping[str, FaultItem]
    picks: int | None = None


@dataclass(frozen=True, slots=True)
class Latency(RocketMQStrategy[LatencyState]):
    """Holds always: `latency_max` ascends and has as many members as `not_available_duration`; both in ms."""

    latency_max: tuple[float, ...] = (50, 100, 550, 1000, 2000, 3000, 15_000)
    not_available_duration: tuple[float, ...] = (0, 0, 30_000, 60_000, 120_000, 180_000, 600_000)
    name: str = field(default="latency", init=False)

    def __post_init__(self) -> None:
        if len(self.latency_max) != len(self.not_available_duration):
            raise ConfigError("latency_max and not_available_duration must have the same number of members")
        if list(self.latency_max) != sorted(self.latency_max):
            raise ConfigError(f"latency_max must ascend: {self.latency_max}")

    def initial(self) -> LatencyState:
        return LatencyState({})

    def choose(
        self,
        state: LatencyState,
        queues: Sequence[MessageQueue],
        now_millis: float,
        last_broker: str | None,
        index: int,
    ) -> Choice[LatencyState]:
        # `last_broker` plays no part: what made the attempt fail has isolated it already.
        table = state.table
        for step in range(index, index + len(queues)):
            queue = queues[step % len(queues)]
            item = table.get(queue.broker_name)
            if item is None or now_millis >= item.available_at:
                return Choice(queue, index, state)  # as in RocketMQ this walk does not move the index
        return self._one_not_best(state, queues, now_millis, index)

    def learn(self, state: LatencyState, now_millis: float, attempt: Attempt) -> LatencyState:
        latency = attempt.latency_millis if attempt.outcome in MEASURED else ISOLATED_LATENCY_MILLIS
        item = FaultItem(latency, now_millis + self.avoided_for(latency))
        return LatencyState({**state.table, attempt.broker: item}, state.picks)

    def avoided_for(self, latency_millis: float) -> float:
        """How long a broker that took `latency_millis` is avoided."""
        reached = bisect_right(self.latency_max, latency_millis)
        return self.not_available_duration[reached - 1] if reached else 0.0

    def _one_not_best(
        self, state: LatencyState, queues: Sequence[MessageQueue], now_millis: float, index: int
    ) -> Choice[LatencyState]:
        """Every broker of the topic is avoided. The table may know brokers of other topics, too: that is its flaw."""

        def order(broker: str) -> tuple[bool, float, float]:
            item = state.table[broker]
            return (now_millis < item.available_at, item.latency_millis, item.available_at)

        ordered = sorted(state.table, key=order)
        picks = index if state.picks is None else state.picks + 1
        broker = ordered[picks % max(1, len(ordered) // 2)]
        writable = [queue for queue in queues if queue.broker_name == broker]
        if writable:
            return Choice(writable[index % len(writable)], index, LatencyState(state.table, picks))
        rest = {name: item for name, item in state.table.items() if name != broker}
        return Choice(queues[index % len(queues)], index, LatencyState(rest, picks))
