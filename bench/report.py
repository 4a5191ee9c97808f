"""How every benchmark reports: rows of (figure, value, unit, ratio to something of the same run)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

QUICK: Final = os.environ.get("QUICK", "") not in ("", "0")
"""Set to see that everything runs: the figures of a quick run are worth little."""


class Figure(NamedTuple):
    """One measured value. Machines are noisy: the ratio to another figure of the same run says more than the value."""

    name: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""


class NotMeasured(NamedTuple):
    """A figure that is missing, and why: it is listed, not hidden."""

    name: str
    reason: str


Row = Figure | NotMeasured


def compared(name: str, value: float, unit: str, base: float, to: str) -> Figure:
    """A figure and its ratio to another; without one when that is zero, as CPU time of a very short load may be."""
    return Figure(name, value, unit, value / base, to) if base else Figure(name, value, unit)


def best_rate(work: Callable[[], int], rounds: int = 5) -> float:
    """Items per second of the best of several rounds; `work` returns how many items it did."""
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        count = work()
        best = max(best, count / (time.perf_counter() - start))
    return best


def alternate(works: dict[str, Callable[[], int]], rounds: int = 5) -> dict[str, float]:
    """The best rate of each work, taken in turns so that a busy moment of the machine hits all alike."""
    best = dict.fromkeys(works, 0.0)
    for _ in range(rounds):
        for name, work in works.items():
            best[name] = max(best[name], best_rate(work, rounds=1))
    return best


def exact_cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far, in nanoseconds as the scheduler counts it: for short stretches."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(rows: Iterable[Row]) -> str:
    lines = ["| figure | value | ratio |", "|---|---|---|"]
    for row in rows:
        if isinstance(row, NotMeasured):
            lines.append(f"| {row.name} | not measured: {row.reason} | |")
            continue
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} x {row.to}"
        lines.append(f"| {row.name} | {number_text(row.value)} {row.unit} | {ratio} |")
    return "\n".join(lines)


def number_text(value: float) -> str:
    if value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
