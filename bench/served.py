"""A broker process of its own for each benchmark, and loads on it by turns."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from downrange.client.load import LoadReport, Target, find_target
from downrange.transport.loop import run as run_loop
from tests.support.standalone_process import Standalone, standalone_process

_topics = itertools.count()


@contextmanager
def served(settings: Mapping[str, object] | None = None) -> Iterator[Standalone]:
    """Name server and broker in one process, its data in a directory that is removed afterwards."""
    # With every core busy a request may wait longer than the 200 ms after which a broker refuses it.
    patient = {"waitTimeMillsInSendQueue": 10_000, **(settings or {})}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        standalone_process(Path(directory), patient, log_level="ERROR") as running,
    ):
        yield running


def target(running: Standalone, topic: str | None = None, queues: int = 4) -> Target:
    """A topic of its own unless one is named."""
    name = topic or f"bench-{next(_topics)}"
    return run_loop(find_target(topic=name, queues=queues, broker=running.broker, server_pid=running.process.pid))


class Best:
    """The best of several rounds of one load: the highest rate, and the lowest CPU, which may be of another round."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.server_cpu_micros = float("inf")
        self.own_cpu_micros = float("inf")
        self.reports: list[LoadReport] = []

    def add(self, report: LoadReport) -> None:
        self.reports.append(report)
        self.rate = max(self.rate, report.rate)
        self.own_cpu_micros = min(self.own_cpu_micros, report.own_cpu_micros)
        if report.server_cpu_micros is not None:
            self.server_cpu_micros = min(self.server_cpu_micros, report.server_cpu_micros)

    def latency(self, what: str, percentile: str) -> float:
        """The lowest of all rounds, in milliseconds."""
        return min(float(getattr(report.latency[what], percentile)) for report in self.reports)

    @property
    def refused(self) -> int:
        return sum(sum(report.refused.values()) for report in self.reports)


def by_turns(loads: Mapping[str, Callable[[], LoadReport]], rounds: int) -> dict[str, Best]:
    """Every load once, then every load again: a busy moment of the machine hits all alike."""
    best = {name: Best() for name in loads}
    for _ in range(rounds):
        for name, load in loads.items():
            best[name].add(load())
    return best
