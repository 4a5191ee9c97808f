"""One run: producers, brokers and faults on a virtual clock, event by event.

The producers decide with the code of the real client: `client/fault` chooses and learns, `client/retry` decides what
follows an attempt. Only the brokers and the network are simulated (`broker_model.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any, Final

from downrange.client.producer.fault import PROBE_TIMEOUT_MILLIS, Attempt, FaultStrategy, Outcome, QueueChooser
from downrange.client.producer.retry import Decision, after_attempt, attempt_timeout
from downrange.model.message import MessageQueue
from downrange.protocol.codes import ResponseCode
from downrange.settings import ConfigError
from downrange.simulation.broker_model import Ailment, Fault, SimulatedBroker
from downrange.simulation.plan import Plan, broker_name
from downrange.simulation.report import Report, Tally
from downrange.simulation.scenarios import SCENARIOS

REFRESH_SOON_MILLIS: Final = 1000.0

Event = tuple[float, int, Callable[..., None], tuple[Any, ...]]


@dataclass(slots=True, eq=False)
class SimulatedProducer:
    """One producer: the queues in its route, what it has learned about brokers, and when it next sends probes."""

    number: int
    queues: tuple[MessageQueue, ...]
    chooser: QueueChooser
    probes_at: float | None = None
    refreshed_at: float = -inf

    @property
    def has_choice(self) -> bool:
        """Whether several brokers serve the topic."""
        return self.queues[0].broker_name != self.queues[-1].broker_name


@dataclass(slots=True, eq=False)
class Send:
    """One message under way."""

    producer: SimulatedProducer
    started: float
    attempts: int = 0
    last_broker: str | None = None
    copies: int = 0


def simulate(plan: Plan, scenario: str, strategy: FaultStrategy[Any]) -> Report:
    """Run `scenario` once. The same plan gives the same load and the same broker noise, whatever the strategy."""
    if scenario not in SCENARIOS:
        raise ConfigError(f"no scenario {scenario!r}; there are {', '.join(SCENARIOS)}")
    return Simulation(plan, SCENARIOS[scenario].faults(plan), strategy).run(scenario)


class Simulation:
    """Holds always: events are handled in the order of virtual time, those of one moment in the order of creation."""

    def __init__(self, plan: Plan, faults: Sequence[Fault], strategy: FaultStrategy[Any]) -> None:
        self.plan = plan
        self.strategy = strategy
        self._faults = faults
        self._suspects = {broker_name(fault.broker) for fault in faults}
        self._end = plan.seconds * 1000
        self._events: list[Event] = []
        self._made = 0
        self._brokers = {
            broker_name(broker): SimulatedBroker(
                plan, [fault for fault in faults if fault.broker == broker], self._random(f"broker {broker}")
            )
            for broker in range(plan.brokers)
        }
        self._tally = Tally(plan.seconds, min(fault.start for fault in faults), max(fault.end for fault in faults))

    def _random(self, name: str) -> Random:
        return Random(f"{self.plan.seed} {name}")  # noqa: S311  repeatable by intent

    def run(self, scenario: str) -> Report:
        starts = self._random("starts")
        producers = []
        for number in range(self.plan.producers):
            queues = self._queues(number, 0.0)
            producer = SimulatedProducer(number, queues, QueueChooser(self.strategy, self._random(f"index {number}")))
            producers.append(producer)
            self._at(starts.random() * self.plan.route_refresh_seconds * 1000, self._refresh_routes, producer)
        # Many producers that send at random moments are one stream of random moments, each with a random producer.
        arrivals = self._random("arrivals")
        rate_per_milli = self.plan.producers * self.plan.rate_per_producer / 1000
        now = arrivals.expovariate(rate_per_milli)
        while now < self._end:
            self._handle_until(now)
            self._attempt(now, Send(producers[int(arrivals.random() * len(producers))], now))
            now += arrivals.expovariate(rate_per_milli)
        self._handle_until(inf)
        return self._report(scenario)

    def _handle_until(self, time: float) -> None:
        events = self._events
        while events and events[0][0] <= time:
            now, _, handle, arguments = heapq.heappop(events)
            handle(now, *arguments)

    def _at(self, time: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._made += 1
        heapq.heappush(self._events, (time, self._made, handle, arguments))

    # --- sending --------------------------------------------------------------------------------------------------

    def _attempt(self, now: float, send: Send) -> None:
        name = send.producer.chooser.choose(send.producer.queues, now, send.last_broker).broker_name
        broker = self._brokers[name]
        is_suspect = name in self._suspects
        self._tally.attempt(now, is_suspect=is_suspect, is_faulty=is_suspect and broker.fault_at(now) is not None)
        limit, longest = self._limits(now, send, name)
        fate = broker.send(now, limit)
        outcome = Outcome.GIVEN_UP if fate.outcome is Outcome.TIMEOUT and limit < longest else fate.outcome
        send.attempts += 1
        send.copies += fate.stored
        self._tally.given_up += outcome is Outcome.GIVEN_UP
        self._at(fate.ends_at, self._attempt_ended, send, Attempt(name, fate.ends_at - now, outcome))

    def _limits(self, now: float, send: Send, broker: str) -> tuple[float, float]:
        """How long the attempt may take, and how long it might if the strategy had learned no time-out; in ms."""
        left = (send.started + self.plan.send_timeout_millis - now) / 1000
        millis = self.plan.attempt_timeout_millis
        per_attempt = None if millis is None else millis / 1000
        patience = send.producer.chooser.patience_millis(broker)
        if patience is None or not send.producer.has_choice:
            limit = 1000 * attempt_timeout(0, left, per_attempt)
            return limit, limit
        attempts = self.plan.attempts - send.attempts
        return (
            1000 * attempt_timeout(0, left, per_attempt, patience / 1000, attempts),
            1000 * attempt_timeout(0, left, per_attempt, inf, attempts),
        )

    def _attempt_ended(self, now: float, send: Send, attempt: Attempt) -> None:
        send.producer.chooser.attempt_ended(now, attempt.broker, attempt.latency_millis, attempt.outcome)
        self._look_for_probes(now, send.producer)
        decision = after_attempt(
            send.attempts,
            self.plan.attempts,
            attempt.outcome,
            int(ResponseCode.SYSTEM_BUSY) if attempt.outcome is Outcome.FLOW_CONTROL else None,
            now / 1000,
            (send.started + self.plan.send_timeout_millis) / 1000,
        )
        if attempt.outcome is not Outcome.OK:
            self._refresh_soon(now, send.producer)
        if decision is Decision.RETRY:
            send.last_broker = attempt.broker
            self._attempt(now, send)
        else:
            self._tally.ended(send.started, now, acknowledged=decision is Decision.RETURN, copies=send.copies)

    # --- probing and routes ---------------------------------------------------------------------------------------

    def _look_for_probes(self, now: float, producer: SimulatedProducer) -> None:
        due = producer.chooser.next_probe_at()
        if due is not None and due < self._end and (producer.probes_at is None or due < producer.probes_at):
            producer.probes_at = max(now, due)
            self._at(producer.probes_at, self._probe, producer)

    def _probe(self, now: float, producer: SimulatedProducer) -> None:
        if producer.probes_at != now:
            return  # an earlier round of probes replaced this one
        producer.probes_at = None
        for name in producer.chooser.probes(now):
            self._tally.probes += 1
            if any(queue.broker_name == name for queue in producer.queues):
                ends_at, ok = self._brokers[name].probe(now, PROBE_TIMEOUT_MILLIS)
            else:
                ends_at, ok = now, False  # the route no longer has an address of this broker
                if self.plan.probes_refresh_route:
                    self._refresh_soon(now, producer)
            self._at(ends_at, self._probed, producer, name, ok, ends_at - now)

    def _probed(self, now: float, producer: SimulatedProducer, name: str, ok: bool, latency: float) -> None:
        producer.chooser.probed(now, name, ok, latency)
        self._look_for_probes(now, producer)

    def _refresh_routes(self, now: float, producer: SimulatedProducer) -> None:
        if now < self._end:
            self._take_route(now, producer)
            self._at(now + self.plan.route_refresh_seconds * 1000, self._refresh_routes, producer)

    def _refresh_soon(self, now: float, producer: SimulatedProducer) -> None:
        """After an error, look the route up again, at most once a second."""
        if now - producer.refreshed_at >= REFRESH_SOON_MILLIS:
            producer.refreshed_at = now
            self._at(now + self.plan.network_millis, self._take_route, producer)

    def _take_route(self, now: float, producer: SimulatedProducer) -> None:
        """Take the name server's route, which leaves out brokers without a connection; an empty route is ignored."""
        producer.queues = self._queues(producer.number, now) or producer.queues

    def _queues(self, producer: int, now: float) -> tuple[MessageQueue, ...]:
        return tuple(
            MessageQueue("simulated", broker_name(broker), queue_id)
            for broker in self.plan.brokers_of(producer)
            if (fault := self._brokers[broker_name(broker)].fault_at(now)) is None
            or fault.ailment is not Ailment.CRASHED
            for queue_id in range(self.plan.queues_per_broker)
        )

    # --- reporting ------------------------------------------------------------------------------------------------

    def _report(self, scenario: str) -> Report:
        share = dict.fromkeys(self._brokers, 0.0)
        for number in range(self.plan.producers):
            brokers = self.plan.brokers_of(number)
            for broker in brokers:
                share[broker_name(broker)] += 1 / len(brokers) / self.plan.producers
        length = self._tally.fault_end - self._tally.fault_start
        fair_share = sum(
            share[broker_name(fault.broker)] * (fault.end - fault.start) / length for fault in self._faults
        )
        suspects_share = sum(share[name] for name in self._suspects)
        return self._tally.report(scenario, self.strategy.name, fair_share, suspects_share)
