"""End-to-end latency: one producer, one puller that waits, 128 B, at 500 messages a second and at half of what goes.

Latency counts from the moment a message was due, so a stall delays every message of its time. The round with the lowest
p99 is reported, whole: percentiles of several rounds are not mixed. "Sent late" is the generator's own part of it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from bench.quiet import undisturbed
from bench.report import QUICK, Figure, table
from bench.served import end_to_end_apart, send_apart, served, target
from downrange.load import LoadReport, SendPlan, Target

ROUNDS: Final = 1 if QUICK else 3
SECONDS: Final = 1.0 if QUICK else 6.0
LOADS: Final = ("500 messages/s", "half of the maximum")
PERCENTILES: Final = {"p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p999", "max": "max"}


def at_rate(where: Target, rate: float) -> LoadReport:
    """The best of several rounds."""
    load = partial(end_to_end_apart, where, SendPlan(SECONDS, 0.5, rate=rate))
    rounds = [undisturbed(load) for _ in range(ROUNDS)]
    return min(rounds, key=lambda report: report.latency["end to end"].p99)


def run() -> list[Figure]:
    with served() as running:
        # What one connection can do is what one producer can do; more than can be received at the same time.
        sent = send_apart(target(running, "sent"), SendPlan(SECONDS / 2, 0.3, connections=1, outstanding=256)).rate
        most = end_to_end_apart(target(running, "most"), SendPlan(SECONDS / 2, 0.3, rate=sent)).rate
        rates = dict(zip(LOADS, (500.0, most / 2), strict=True))
        reports = {load: at_rate(target(running, f"rate-{rate:.0f}"), rate) for load, rate in rates.items()}
    figures = [
        Figure("the most that is sent, one connection with 256 outstanding", sent, "messages/s"),
        Figure("the maximum, sent by one connection and received by another", most, "messages/s"),
    ]
    for load, report in reports.items():
        figures.append(Figure(f"at {load}: received", report.rate, "messages/s"))
        for what in ("end to end", "reply", "sent late"):
            figures += [
                Figure(f"at {load}: {what} {shown}", getattr(report.latency[what], key), "ms")
                for shown, key in PERCENTILES.items()
            ]
    return figures


if __name__ == "__main__":
    print(table(run()))
