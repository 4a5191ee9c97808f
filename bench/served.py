"""A broker process of its own for each benchmark, and loads on it by turns."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bench.quiet import cores_apart, undisturbed
from downrange.load import (
    LoadReport,
    PullPlan,
    SendPlan,
    Target,
    end_to_end,
    find_target,
    pull_load,
    send_load,
)
from downrange.transport.loop import run as run_loop
from tests.support.standalone_process import Standalone, standalone_process

Load = Callable[[], LoadReport]
Plan = TypeVar("Plan", SendPlan, PullPlan)
_topics = itertools.count()


@contextmanager
def served(settings: Mapping[str, object] | None = None) -> Iterator[Standalone]:
    """Name server and broker in one process, its data in a directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, served_in(Path(directory), settings) as running:
        yield running


@contextmanager
def served_in(directory: Path, settings: Mapping[str, object] | None = None) -> Iterator[Standalone]:
    """The same with its data in a directory that stays."""
    # With every core busy a request may wait longer than the 200 ms after which a broker refuses it.
    patient = {"waitTimeMillsInSendQueue": 10_000, **(settings or {})}
    with standalone_process(directory, patient, log_level="ERROR") as running:
        yield running


def target(running: Standalone, topic: str | None = None, queues: int = 4, topics: int = 1) -> Target:
    """A topic of its own unless one is named."""
    name = topic or f"bench-{next(_topics)}"
    return run_loop(
        find_target(topic=name, queues=queues, topics=topics, broker=running.broker, server_pid=running.process.pid)
    )


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


def by_turns(
    loads: Mapping[str, Load], rounds: int, run: Callable[[Load], LoadReport] = undisturbed
) -> dict[str, Best]:
    """Every load once, then every load again: a busy moment of the machine hits all alike."""
    best: dict[str, Best] = {}
    for _ in range(rounds):
        add_round(best, loads, run)
    return best


def add_round(
    best: dict[str, Best], loads: Mapping[str, Load], run: Callable[[Load], LoadReport] = undisturbed
) -> None:
    for name, load in loads.items():
        best.setdefault(name, Best()).add(run(load))


def send_apart(where: Target, plan: SendPlan) -> LoadReport:
    """Sends with a core for the generator and another for the broker."""
    return _apart(send_load, where, plan)


def pull_apart(where: Target, plan: PullPlan) -> LoadReport:
    """Pulls, in the same way."""
    return _apart(pull_load, where, plan)


def end_to_end_apart(where: Target, plan: SendPlan) -> LoadReport:
    """Sends at a rate and receives, in the same way."""
    return _apart(end_to_end, where, plan)


def _apart(load: Callable[[Target, Plan], LoadReport], where: Target, plan: Plan) -> LoadReport:
    assert where.server is not None
    with cores_apart(where.server.pid):
        return load(where, plan)
