"""`adaptive`: keeps away from brokers that fail or drag, and comes back seconds after they are well.

The rules, for each broker as one producer sees it:

1. *Open* until something happens. While all is well the choice is plain round robin.
2. A failed attempt (time-out, no connection, connection lost, broker error) makes it *avoided*. It gets no messages but
   probes: the first after `first_probe_millis`, then at intervals that double up to `longest_probe_millis`.
3. After a good probe the next message in turn, never a retry, tries it: one message, since a probe can be fast where
   messages are not. A good answer opens the broker; should there be no news within `trial_millis`, a good probe does.
   Its share then grows from `least_share` to full within `ramp_millis`: a broker that starts is not flooded.
4. An open broker that is slower than the best of the group gets a smaller share: best / own latency, both smoothed.
   Latency up to `unnoticed_millis` never counts. Without news the excess halves every `forget_millis`.
5. Below `least_share` it is avoided like a failed one, and only a fast answer is a good one. But slowness never takes
   away more than half of the brokers: when most are slow, the load is the cause, and fewer brokers make it worse.
6. Flow control counts as a slow answer: the broker is alive and asks for less. A refused message counts as an answer.
7. A broker that fails its trial, or is avoided again within `relapse_millis` of its return, waits `relapse_factor`
   times as long as before for its first probe, up to `longest_relapse_millis`: one that flaps is met ever less often.
8. An attempt that began before the broker's last change between open and avoided tells nothing about it now.
9. When every broker is avoided, messages go to those that answered their last probe, else to all in turn, and any good
   answer opens. A retry takes another broker than the one that failed, unless that is the only one open.
10. An attempt is given up, and another broker asked, when it takes much longer than this broker's answers do
   (`patience.py`). That is a failure of the broker, but as with rule 5 only while no more than half are avoided. The
   message may be stored all the same, and so twice: what may be given up is a budget, `give_up_part` of the answers.

What a broker loses goes to the other open ones in proportion to their shares, not to its neighbour in the list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import exp2, inf
from typing import Final, NamedTuple

from downrange.client.producer.fault.attempt import Attempt, Outcome
from downrange.client.producer.fault.patience import NOTHING_KNOWN, Answers, patience_millis
from downrange.client.producer.fault.strategy import Choice
from downrange.model.message import MessageQueue
from downrange.settings import ConfigError

FAILURES: Final = frozenset({Outcome.TIMEOUT, Outcome.CONNECT_FAILED, Outcome.CONNECTION_LOST, Outcome.BROKER_ERROR})
ANSWERS: Final = frozenset({Outcome.OK, Outcome.NOT_STORE_OK, Outcome.REFUSED})
LONG_AGO: Final = -inf
FIRST_BUDGET: Final = 2.0


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Parameters of `adaptive`; the rules above say what each is for."""

    smoothing: float = 0.3
    unnoticed_millis: float = 20
    least_share: float = 0.1
    forget_millis: float = 5_000
    first_probe_millis: float = 500
    longest_probe_millis: float = 2_000
    trial_millis: float = 3_000
    ramp_millis: float = 2_000
    relapse_millis: float = 30_000
    relapse_factor: float = 4
    longest_relapse_millis: float = 16_000
    flow_control_millis: float = 100
    patience_factor: float = 4
    """How many times the high-water mark of a broker's latencies an answer may take..."""
    patience_answers: float = 8
    """...and twice as long after so few answers, three times after half as few, and so on."""
    least_patience_millis: float = 50
    give_up_part: float = 0.01
    most_give_ups: float = 10
    """As many attempts may be given up at once, if none was for a long time."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) <= 0:
                raise ConfigError(f"adaptive: {one.name} must be positive: {getattr(self, one.name)}")
        for name in ("smoothing", "least_share", "give_up_part"):
            if getattr(self, name) > 1:
                raise ConfigError(f"adaptive: {name} must be at most 1: {getattr(self, name)}")
        if not self.first_probe_millis <= self.longest_probe_millis <= self.longest_relapse_millis:
            raise ConfigError(
                "adaptive: first_probe_millis <= longest_probe_millis <= longest_relapse_millis must hold"
            )
        if self.relapse_factor < 1:
            raise ConfigError(f"adaptive: relapse_factor must be at least 1: {self.relapse_factor}")


class Stage(Enum):
    """How far an avoided broker is on its way back."""

    PROBED = "probed"  # no probe was good yet
    READY = "ready"  # the next message in turn tries it
    TRIED = "tried"  # that message is under way


class Avoidance(NamedTuple):
    """Why a broker gets no messages and how its probing stands. `answers` tells whether it does, if only slowly."""

    answers: bool
    probe_at: float
    interval_millis: float
    stage: Stage = Stage.PROBED


class Health(NamedTuple):
    """One broker as this producer sees it.

    `since` is its last change between open and avoided, `wait_millis` how long the last avoidance waited for a probe.
    """

    latency_millis: float
    seen_at: float
    since: float = LONG_AGO
    wait_millis: float = 0.0
    avoidance: Avoidance | None = None
    answers: Answers = NOTHING_KNOWN


class AdaptiveState(NamedTuple):
    """Holds always: `avoided` names exactly the brokers whose health has an avoidance.

    `budget` is how many attempts may be given up; below 0 after several were given up at the same time.
    """

    brokers: Mapping[str, Health]
    avoided: frozenset[str] = frozenset()
    budget: float = 0.0

    def with_health(self, broker: str, health: Health) -> AdaptiveState:
        avoided = self.avoided
        if (health.avoidance is not None) != (broker in avoided):
            avoided = avoided ^ {broker}
        return AdaptiveState({**self.brokers, broker: health}, avoided, self.budget)

    @property
    def may_avoid(self) -> bool:
        """Whether at most half of the brokers are avoided after one more is."""
        return 2 * (len(self.avoided) + 1) <= len(self.brokers)


@dataclass(frozen=True, slots=True)
class Adaptive:
    settings: AdaptiveSettings = field(default_factory=AdaptiveSettings)
    name: str = field(default="adaptive", init=False)

    def initial(self) -> AdaptiveState:
        return AdaptiveState({}, budget=FIRST_BUDGET)

    # --- choosing -------------------------------------------------------------------------------------------------

    def choose(
        self,
        state: AdaptiveState,
        queues: Sequence[MessageQueue],
        now_millis: float,
        last_broker: str | None,
        index: int,
    ) -> Choice[AdaptiveState]:
        in_turn = queues[index % len(queues)]
        if in_turn.broker_name != last_broker:
            share = self.share(state, in_turn.broker_name, now_millis)
            if share >= 1 or _scatter(index) < share:
                return Choice(in_turn, index, state)
            if last_broker is None and _stage(state, in_turn.broker_name) is Stage.READY:
                return Choice(in_turn, index, self._on_trial(state, now_millis, in_turn.broker_name))
        return Choice(self._instead_of(in_turn, state, queues, now_millis, last_broker, index), index, state)

    def share(self, state: AdaptiveState, broker: str, now_millis: float) -> float:
        """The part of its fair load that `broker` gets now: 0 while avoided, 1 while all is well."""
        health = state.brokers.get(broker)
        if health is None:
            return 1.0
        if health.avoidance is not None:
            return 0.0
        share = self._pace(state, health, now_millis)
        since_return = now_millis - health.since
        if since_return < self.settings.ramp_millis:
            share *= max(self.settings.least_share, since_return / self.settings.ramp_millis)
        return max(self.settings.least_share, share)

    def _instead_of(
        self,
        in_turn: MessageQueue,
        state: AdaptiveState,
        queues: Sequence[MessageQueue],
        now_millis: float,
        last_broker: str | None,
        index: int,
    ) -> MessageQueue:
        """Another queue than the one in turn, drawn by share; the last resort when no broker is open."""
        shares = {broker: self.share(state, broker, now_millis) for broker in {queue.broker_name for queue in queues}}
        for unwanted in ({in_turn.broker_name, last_broker}, {last_broker}, set[str | None]()):
            weights = [0.0 if queue.broker_name in unwanted else shares[queue.broker_name] for queue in queues]
            if any(weights):
                return queues[_drawn(weights, _scatter(~index))]
        others = [queue for queue in queues if queue.broker_name != last_broker] or queues
        answering = [queue for queue in others if _answers(state.brokers[queue.broker_name])]
        rest = answering or others
        return rest[index % len(rest)]

    def _on_trial(self, state: AdaptiveState, now_millis: float, broker: str) -> AdaptiveState:
        health = state.brokers[broker]
        avoidance = Avoidance(True, now_millis + self.settings.trial_millis, health.wait_millis, Stage.TRIED)
        return state.with_health(broker, health._replace(avoidance=avoidance))

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self, state: AdaptiveState, now_millis: float, attempt: Attempt) -> AdaptiveState:
        broker, latency, outcome, times = attempt
        if outcome is Outcome.GIVEN_UP:
            state = state._replace(budget=state.budget - 1)
        health = state.brokers.get(broker)
        if outcome is Outcome.INTERRUPTED or (health is not None and now_millis - latency < health.since):
            return state
        if outcome in ANSWERS and state.budget < self.settings.most_give_ups:
            state = state._replace(budget=state.budget + times * self.settings.give_up_part)
        if health is not None and health.avoidance is not None:
            if outcome in ANSWERS and self._is_good(state, latency):
                return self._open(state, now_millis, broker, health, latency)
            if health.avoidance.stage is Stage.TRIED:
                answers = outcome not in FAILURES and outcome is not Outcome.GIVEN_UP
                return self._avoid(state, now_millis, broker, health, latency, answers=answers)
            # Bad news of last resorts must not move the next probe: a busy producer would put it off for ever.
            return state
        if outcome in FAILURES or (outcome is Outcome.GIVEN_UP and state.may_avoid):
            return self._avoid(state, now_millis, broker, health or Health(latency, now_millis), latency, answers=False)
        if outcome is Outcome.FLOW_CONTROL:
            latency = max(latency, self.settings.flow_control_millis)
        if health is None:
            return state.with_health(broker, Health(latency, now_millis, answers=NOTHING_KNOWN.after(latency, times)))
        settled = self._settled(state, health, now_millis)
        smoothed = settled + self.settings.smoothing * (latency - settled)
        known = health.answers.after(latency, times)
        health = Health(smoothed, now_millis, health.since, health.wait_millis, answers=known)
        state = state.with_health(broker, health)
        if self._pace(state, health, now_millis) < self.settings.least_share and state.may_avoid:
            return self._avoid(state, now_millis, broker, health, latency, answers=True)
        return state

    def calm_millis(self, state: AdaptiveState, now_millis: float) -> float:
        """Nothing is avoided, nothing is slow, and nothing came back a moment ago."""
        unnoticed, returned = self.settings.unnoticed_millis, now_millis - self.settings.ramp_millis
        if state.avoided or any(
            health.latency_millis > unnoticed or health.since > returned for health in state.brokers.values()
        ):
            return 0.0
        return unnoticed

    def _avoid(
        self,
        state: AdaptiveState,
        now_millis: float,
        broker: str,
        health: Health,
        latency_millis: float,
        *,
        answers: bool,
    ) -> AdaptiveState:
        failed_trial = health.avoidance is not None
        wait = self.settings.first_probe_millis
        if failed_trial or now_millis - health.since < self.settings.relapse_millis:
            wait = min(health.wait_millis * self.settings.relapse_factor, self.settings.longest_relapse_millis)
        avoidance = Avoidance(answers, now_millis + wait, wait)
        known = health.answers.after(latency_millis)  # an answer that did not come would have taken even longer
        return state.with_health(broker, Health(health.latency_millis, now_millis, now_millis, wait, avoidance, known))

    def _open(
        self, state: AdaptiveState, now_millis: float, broker: str, health: Health, latency_millis: float
    ) -> AdaptiveState:
        known = health.answers.after(latency_millis)
        return state.with_health(
            broker, Health(latency_millis, now_millis, now_millis, health.wait_millis, answers=known)
        )

    def _best(self, state: AdaptiveState) -> float:
        """Latency of the fastest open broker, as far as it is noticed."""
        best = min(
            (health.latency_millis for health in state.brokers.values() if health.avoidance is None), default=0.0
        )
        return max(best, self.settings.unnoticed_millis)

    def _settled(self, state: AdaptiveState, health: Health, now_millis: float) -> float:
        """The broker's latency with what exceeds the best half forgotten every `forget_millis`."""
        if health.latency_millis <= self.settings.unnoticed_millis:
            return health.latency_millis
        best = min(self._best(state), health.latency_millis)
        halvings = (now_millis - health.seen_at) / self.settings.forget_millis
        return best + (health.latency_millis - best) * exp2(-halvings)

    def _pace(self, state: AdaptiveState, health: Health, now_millis: float) -> float:
        """Best latency / own latency, at most 1."""
        if health.latency_millis <= self.settings.unnoticed_millis:
            return 1.0
        return min(1.0, self._best(state) / self._settled(state, health, now_millis))

    # --- giving up ------------------------------------------------------------------------------------------------

    def patience_millis(self, state: AdaptiveState, broker: str) -> float | None:
        health = state.brokers.get(broker)
        if health is None or state.budget < 1 or not (state.may_avoid or _stage(state, broker) is Stage.TRIED):
            return inf
        if health.avoidance is not None and health.avoidance.stage is not Stage.TRIED:
            return inf  # a last resort
        settings = self.settings
        return patience_millis(
            health.answers, settings.patience_factor, settings.patience_answers, settings.least_patience_millis
        )

    # --- probing --------------------------------------------------------------------------------------------------

    def probes(self, state: AdaptiveState, now_millis: float) -> tuple[str, ...]:
        return tuple(broker for broker in sorted(state.avoided) if _probe_at(state.brokers[broker]) <= now_millis)

    def next_probe_at(self, state: AdaptiveState) -> float | None:
        due = min((_probe_at(state.brokers[broker]) for broker in state.avoided), default=inf)
        return None if due == inf else due

    def probed(
        self, state: AdaptiveState, now_millis: float, broker: str, ok: bool, latency_millis: float
    ) -> AdaptiveState:
        health = state.brokers.get(broker)
        if health is None or health.avoidance is None or now_millis - latency_millis < health.since:
            return state
        _, _, interval, stage = health.avoidance
        if not ok or not self._is_good(state, latency_millis):
            interval = min(interval * 2, max(self.settings.longest_probe_millis, health.wait_millis))
            avoidance = Avoidance(ok, now_millis + interval, interval)
        elif stage is Stage.TRIED:
            return self._open(state, now_millis, broker, health, latency_millis)
        else:
            avoidance = Avoidance(True, inf, interval, Stage.READY)
        return state.with_health(broker, health._replace(avoidance=avoidance))

    def _is_good(self, state: AdaptiveState, latency_millis: float) -> bool:
        """Whether an answer of an avoided broker was fast enough; while no broker is open, any answer is."""
        if len(state.avoided) == len(state.brokers):
            return True
        return latency_millis * self.settings.least_share <= self._best(state)


def _answers(health: Health) -> bool:
    return health.avoidance is not None and health.avoidance.answers


def _stage(state: AdaptiveState, broker: str) -> Stage | None:
    avoidance = state.brokers[broker].avoidance
    return None if avoidance is None else avoidance.stage


def _probe_at(health: Health) -> float:
    assert health.avoidance is not None
    return health.avoidance.probe_at


def _drawn(weights: Sequence[float], point: float) -> int:
    """The place `point`, of 0 to 1, falls on when the weights lie side by side."""
    left = point * sum(weights)
    last = 0
    for place, weight in enumerate(weights):
        if weight:
            last = place
            left -= weight
            if left < 0:
                break
    return last


_MASK: Final = (1 << 64) - 1


def _scatter(index: int) -> float:
    """A number from 0 to 1 that looks drawn by lot and depends on the index alone, so that choosing stays pure."""
    mixed = (index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    mixed = ((mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93) & _MASK
    return (mixed ^ (mixed >> 32)) / 2**64
