"""The counters of a run, and the report made from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

BUCKET_MILLIS: Final = 500.0
AVOIDED_BELOW: Final = 0.1
"""Brokers count as avoided while their share of attempts is below this part of their fair share..."""
RETURNED_ABOVE: Final = 0.5
"""...and as used again when it is above this part."""


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one strategy in one scenario. Latencies are of whole sends with retries, also of failed sends."""

    scenario: str
    strategy: str
    sends: int
    acknowledged: int
    failed: int
    duplicates: int
    given_up: int
    """Attempts that ended with the time-out that `adaptive` learned; each may be a duplicate."""
    attempts: int
    probes: int
    p50_millis: float
    p99_millis: float
    max_millis: float
    fault_p99_millis: float
    """The 99th percentile for sends that began during the fault."""
    fault_share: float
    """The share of the attempts during the fault that went to a broker while it was faulty."""
    fair_share: float
    """The value of `fault_share` if every broker got the same number of attempts all the time."""
    seconds_to_avoid: float | None
    """From the start of the fault until the faulty brokers' share is below a tenth of the fair one; None: never."""
    seconds_to_return: float | None
    """From the end of the fault until their share is above half of the fair one; None: not before the run ended."""
    share_by_half_second: tuple[float, ...]


class Tally:
    """Counters of one run. Buckets are half seconds of virtual time."""

    def __init__(self, seconds: float, fault_start: float, fault_end: float) -> None:
        buckets = int(seconds * 1000 / BUCKET_MILLIS) + 1
        self.fault_start = fault_start
        self.fault_end = fault_end
        self.sends = 0
        self.acknowledged = 0
        self.failed = 0
        self.duplicates = 0
        self.given_up = 0
        self.probes = 0
        self.attempts_by_bucket = [0] * buckets
        self.attempts_on_suspects = [0] * buckets
        self.attempts_during_fault = 0
        self.attempts_while_faulty = 0
        self.latencies = array("d")
        self.fault_latencies = array("d")

    def attempt(self, now: float, *, is_suspect: bool, is_faulty: bool) -> None:
        bucket = min(int(now / BUCKET_MILLIS), len(self.attempts_by_bucket) - 1)
        self.attempts_by_bucket[bucket] += 1
        self.attempts_on_suspects[bucket] += is_suspect
        self.attempts_during_fault += self.fault_start <= now < self.fault_end
        self.attempts_while_faulty += is_faulty

    def ended(self, started: float, now: float, *, acknowledged: bool, copies: int) -> None:
        self.sends += 1
        self.acknowledged += acknowledged
        self.failed += not acknowledged
        self.duplicates += max(0, copies - 1)
        self.latencies.append(now - started)
        if self.fault_start <= started < self.fault_end:
            self.fault_latencies.append(now - started)

    def report(self, scenario: str, strategy: str, fair_share: float, suspects_share: float) -> Report:
        """Compute the report. `suspects_share` is the fair share of all brokers that fail at some time."""
        latencies = sorted(self.latencies)
        shares = tuple(
            suspects / attempts if attempts else 0.0
            for suspects, attempts in zip(self.attempts_on_suspects, self.attempts_by_bucket, strict=True)
        )
        # In a half second without any attempt all producers waited: it does not show that a broker was avoided.
        avoided = [
            attempts > 0 and share < AVOIDED_BELOW * suspects_share
            for share, attempts in zip(shares, self.attempts_by_bucket, strict=True)
        ]
        returned = [share > RETURNED_ABOVE * suspects_share for share in shares]
        # If all brokers fail, there is no other broker to go to and nothing to return from.
        is_partial = suspects_share < 1 - 1e-9
        return Report(
            scenario=scenario,
            strategy=strategy,
            sends=self.sends,
            acknowledged=self.acknowledged,
            failed=self.failed,
            duplicates=self.duplicates,
            given_up=self.given_up,
            attempts=sum(self.attempts_by_bucket),
            probes=self.probes,
            p50_millis=percentile(latencies, 0.5),
            p99_millis=percentile(latencies, 0.99),
            max_millis=percentile(latencies, 1.0),
            fault_p99_millis=percentile(sorted(self.fault_latencies), 0.99),
            fault_share=self.attempts_while_faulty / max(1, self.attempts_during_fault),
            fair_share=fair_share,
            seconds_to_avoid=_seconds_until(avoided, self.fault_start, self.fault_end) if is_partial else None,
            seconds_to_return=_seconds_until(returned, self.fault_end, None) if is_partial else None,
            share_by_half_second=shares,
        )


def percentile(ascending: Sequence[float], part: float) -> float:
    """The smallest value that `part` of all values do not exceed; 0 when there are none."""
    return ascending[max(0, ceil(part * len(ascending)) - 1)] if ascending else 0.0


def _seconds_until(flags: Sequence[bool], since: float, until: float | None) -> float | None:
    """The seconds from `since` to the first whole bucket that is flagged."""
    first = ceil(since / BUCKET_MILLIS)
    last = len(flags) - 1 if until is None else int(until / BUCKET_MILLIS)  # the last bucket of a run is not full
    for bucket in range(first, last):
        if flags[bucket]:
            return (bucket - first) * BUCKET_MILLIS / 1000
    return None
