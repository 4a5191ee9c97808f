"""From what producers did during a drill to figures. They are made by the simulator's own `Tally`, so that a figure
means the same in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from downrange.client.producer.fault import StrategyName
from downrange.client.producer.hooks import SendContext
from downrange.simulation import Report
from downrange.simulation.report import AVOIDED_BELOW, BUCKET_MILLIS, Tally


@dataclass(frozen=True, slots=True)
class Send:
    """One call of `send`, in milliseconds from the start of the drill."""

    number: int
    caller: int
    started: float
    ended: float
    error: str | None

    @property
    def millis(self) -> float:
        return self.ended - self.started


@dataclass
class Record:
    """What one producer did: its sends, and its attempts as (milliseconds, broker). It is a hook of the producer."""

    strategy: StrategyName
    clock_millis: Callable[[], float]
    sends: list[Send] = field(default_factory=list)
    attempts: list[tuple[float, str]] = field(default_factory=list)
    copies: Counter[int] = field(default_factory=Counter)
    """How often each message was found in the queues afterwards."""

    @property
    def topic(self) -> str:
        return f"drill-{self.strategy}"

    @property
    def missing(self) -> int:
        """Messages that were acknowledged and are in no queue."""
        return sum(send.error is None and not self.copies[send.number] for send in self.sends)

    def before_send(self, context: SendContext) -> None:
        self.attempts.append((self.clock_millis(), context.queue.broker_name))

    def after_send(self, context: SendContext) -> None:
        pass  # the caller sees the whole send, retries included


@dataclass(frozen=True, slots=True)
class Drilled:
    """How one strategy went through one fault."""

    fault: str
    brokers: int
    report: Report
    lost: int
    """Acknowledged, but in no queue. Must be 0."""
    stored_unacknowledged: int
    """Reported as failed, but in a queue: only the answer was lost."""
    slow: int
    """Sends that took longer than half an attempt time-out, from the start of the fault on."""
    slow_of_one_caller: int
    """The most that one caller had of them."""
    share_after_first_second: float
    """Part of the attempts that went to the faulty brokers, from one second after the start of the fault to its end."""
    failing_seconds_after: float
    """From the end of the fault to the last send that failed."""
    fault_millis: tuple[float, float]
    hiccup_millis: float
    """The longest that a request waited with which nothing was wrong: the machine was busy with other things."""
    shares: dict[str, tuple[float, ...]]
    """Part of the attempts to each broker, in half seconds."""
    errors: dict[str, int]
    latencies: tuple[tuple[float, float], ...]
    """Start and latency of every send, in milliseconds."""

    def as_json(self) -> dict[str, Any]:
        """Everything but the single sends."""
        return {key: value for key, value in asdict(self).items() if key != "latencies"}


def figures(
    record: Record,
    fault: str,
    *,
    brokers: Collection[str],
    faulty: Collection[str],
    seconds: float,
    fault_millis: tuple[float, float],
    slow_millis: float,
    hiccup_millis: float,
) -> Drilled:
    # Buckets are counted from the start of the fault, as in the simulator: it lies on the border of two.
    shift = round(fault_millis[0] / BUCKET_MILLIS) * BUCKET_MILLIS - fault_millis[0]
    start, end = fault_millis[0] + shift, fault_millis[1] + shift
    tally = Tally(seconds, start, end)
    by_bucket: Counter[tuple[str, int]] = Counter()
    after_first_second: Counter[bool] = Counter()
    for clock_millis, broker in record.attempts:
        at = clock_millis + shift
        is_suspect = broker in faulty
        tally.attempt(at, is_suspect=is_suspect, is_faulty=is_suspect and start <= at < end)
        by_bucket[broker, int(at / BUCKET_MILLIS)] += 1
        if start + 1000 <= at < end:
            after_first_second[is_suspect] += 1
    sends = [replace(send, started=send.started + shift, ended=send.ended + shift) for send in record.sends]
    for send in sends:
        tally.ended(send.started, send.ended, acknowledged=send.error is None, copies=record.copies[send.number])
    buckets = range(int(seconds * 1000 / BUCKET_MILLIS))
    totals = [sum(by_bucket[broker, bucket] for broker in brokers) for bucket in buckets]
    slow = [send for send in sends if send.ended > start and send.millis > slow_millis]
    fair_share = len(faulty) / len(brokers)
    report = tally.report(fault, record.strategy, fair_share, fair_share)
    if report.seconds_to_avoid is not None:
        # A few callers that all wait may leave out a broker for half a second without meaning it.
        since = start + report.seconds_to_avoid * 1000
        later = Counter(broker in faulty for at, broker in record.attempts if since <= at + shift < end)
        if later[True] >= AVOIDED_BELOW * fair_share * later.total():
            report = replace(report, seconds_to_avoid=None)
    return Drilled(
        fault=fault,
        brokers=len(brokers),
        report=report,
        lost=record.missing,
        stored_unacknowledged=sum(send.error is not None and record.copies[send.number] > 0 for send in sends),
        slow=len(slow),
        slow_of_one_caller=max(Counter(send.caller for send in slow).values(), default=0),
        share_after_first_second=after_first_second[True] / max(1, after_first_second.total()),
        failing_seconds_after=max(
            (send.ended - end for send in sends if send.error is not None and send.ended > end), default=0.0
        )
        / 1000,
        fault_millis=(start, end),
        hiccup_millis=hiccup_millis,
        shares={
            broker: tuple(by_bucket[broker, bucket] / max(1, totals[bucket]) for bucket in buckets)
            for broker in sorted(brokers)
        },
        errors=dict(Counter(send.error for send in sends if send.error is not None)),
        latencies=tuple((send.started, send.millis) for send in sends),
    )
