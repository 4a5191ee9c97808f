"""A model of a broker as a producer sees it: it takes time, has a queue, and has faults at known times.

A message waits for its turn (the broker takes `capacity` a second), is then stored within a log-normal time, and the
reply travels back. A message that would wait longer than `waitTimeMillsInSendQueue` is refused with flow control.
Since all faults are known in advance, the fate of an attempt is computed the moment it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, log
from random import Random
from typing import Final, NamedTuple

from downrange.client.producer.fault import Outcome
from downrange.simulation.plan import Plan

SEND_QUEUE_WAIT_MILLIS: Final = 200.0


class Ailment(StrEnum):
    CRASHED = "crashed"  # connections are refused; requests under way are lost
    STOPPED = "stopped"  # as by SIGSTOP: requests wait in the socket and are served afterwards
    SILENT = "silent"  # the network swallows everything
    SLOW = "slow"  # every answer takes `added_millis` more
    SLOW_DISK = "slow disk"  # messages take `added_millis` more, probes do not
    WEAK = "weak"  # takes `capacity` messages a second only


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one broker, from `start` until `end` in milliseconds."""

    broker: int
    start: float
    end: float
    ailment: Ailment
    added_millis: float = 0.0
    capacity: float = 0.0


class Fate(NamedTuple):
    """The fate of one request: when the producer learns which outcome, and whether the message is in the log."""

    ends_at: float
    outcome: Outcome
    stored: bool


class SimulatedBroker:
    """One broker. Holds always: requests are offered in order of time, and its faults do not overlap."""

    def __init__(self, plan: Plan, faults: Sequence[Fault], random_source: Random) -> None:
        self._faults = sorted(faults, key=lambda fault: fault.start)
        self._next_fault = 0
        self._fault: Fault | None = None
        self._half_way = plan.network_millis / 2
        self._turn_millis = 1000 / plan.capacity
        self._mean = log(plan.service_millis)
        self._sigma = plan.service_sigma
        self._random = random_source
        self._free_at = 0.0

    def fault_at(self, now: float) -> Fault | None:
        while self._next_fault < len(self._faults) and self._faults[self._next_fault].start <= now:
            self._fault = self._faults[self._next_fault]
            self._next_fault += 1
        if self._fault is not None and self._fault.end <= now:
            if self._fault.ailment is Ailment.CRASHED:
                self._free_at = self._fault.end  # after the fault the broker starts with an empty queue
            self._fault = None
        return self._fault

    def send(self, now: float, timeout: float) -> Fate:
        """The fate of a message sent now."""
        fault = self.fault_at(now)
        ailment = None if fault is None else fault.ailment
        arrival = now + self._half_way
        turn_millis = self._turn_millis
        added = 0.0
        if fault is not None:
            if ailment is Ailment.CRASHED:
                return Fate(now + min(timeout, 2 * self._half_way), Outcome.CONNECT_FAILED, False)
            if ailment is Ailment.SILENT:
                return Fate(now + timeout, Outcome.TIMEOUT, False)
            if ailment is Ailment.STOPPED:
                arrival = max(arrival, fault.end)
            elif ailment is Ailment.WEAK:
                turn_millis = 1000 / fault.capacity
            else:
                added = fault.added_millis
        begin = max(arrival, self._free_at)
        if begin - arrival > SEND_QUEUE_WAIT_MILLIS:
            replied = arrival + SEND_QUEUE_WAIT_MILLIS + self._half_way
            return self._seen_by_the_producer(now, timeout, inf, replied, Outcome.FLOW_CONTROL)
        self._free_at = begin + turn_millis
        stored_at = self._free_at + self._service() + added
        return self._seen_by_the_producer(now, timeout, stored_at, stored_at + self._half_way, Outcome.OK)

    def probe(self, now: float, timeout: float) -> tuple[float, bool]:
        """When a probe is answered or given up, and whether it succeeded. Probes wait in no queue."""
        fault = self.fault_at(now)
        replied = now + 2 * self._half_way + self._service()
        if fault is not None:
            match fault.ailment:
                case Ailment.CRASHED:
                    return now + 2 * self._half_way, False
                case Ailment.SILENT:
                    replied = inf
                case Ailment.STOPPED:
                    replied = max(replied, fault.end)
                case Ailment.SLOW:
                    replied += fault.added_millis
                case Ailment.SLOW_DISK | Ailment.WEAK:
                    pass
        return min(replied, now + timeout), replied <= now + timeout

    def _service(self) -> float:
        return self._random.lognormvariate(self._mean, self._sigma)

    def _seen_by_the_producer(
        self, now: float, timeout: float, stored_at: float, replied: float, outcome: Outcome
    ) -> Fate:
        """The fate of a request, which a fault that begins before the reply arrives may change."""
        if self._next_fault < len(self._faults) and self._faults[self._next_fault].start < replied:
            fault = self._faults[self._next_fault]
            match fault.ailment:
                case Ailment.CRASHED:
                    replied, outcome = fault.start + self._half_way, Outcome.CONNECTION_LOST
                    stored_at = stored_at if stored_at < fault.start else inf
                case Ailment.STOPPED:
                    replied += fault.end - fault.start
                case Ailment.SILENT:
                    replied = inf
                case Ailment.SLOW | Ailment.SLOW_DISK | Ailment.WEAK:
                    pass
        if replied > now + timeout:
            return Fate(now + timeout, Outcome.TIMEOUT, stored_at < inf)
        return Fate(replied, outcome, stored_at < inf)
