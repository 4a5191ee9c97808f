"""Latency of every send and share of every broker over time, one column for each strategy."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from bench.failover_figures import Drilled
from downrange.simulation.report import BUCKET_MILLIS


def plot(path: Path, title: str, rows: Sequence[Drilled]) -> str:
    """Write the picture; the sentence to print, also when it cannot be written."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return f"{path.name} was not drawn: matplotlib is missing, install it with pip install 'downrange[bench]'"
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(2, len(rows), figsize=(4.6 * len(rows), 6), sharex=True, sharey="row", squeeze=False)
    for (upper, lower), row in zip(axes.T, rows, strict=True):
        starts = [start / 1000 for start, _ in row.latencies]
        upper.scatter(starts, [max(0.1, millis) for _, millis in row.latencies], s=2, linewidths=0)
        upper.set_yscale("log")
        upper.set_title(row.report.strategy)
        is_idle = [not any(shares) for shares in zip(*row.shares.values(), strict=True)]
        times = [bucket * BUCKET_MILLIS / 1000 for bucket in range(len(is_idle))]
        for broker, shares in row.shares.items():
            drawn = [nan if idle else share for share, idle in zip(shares, is_idle, strict=True)]
            lower.step(times, drawn, where="post", label=broker)
        lower.set_ylim(-0.02, 1.02)
        lower.set_xlabel("seconds")
        for axis in (upper, lower):
            axis.axvspan(*(millis / 1000 for millis in row.fault_millis), color="0.9", zorder=0)
    axes[0][0].set_ylabel("latency of a send, ms")
    axes[1][0].set_ylabel("share of attempts")
    axes[1][-1].legend(loc="upper right")
    figure.suptitle(f"{title}; {rows[0].brokers} brokers")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return f"{path.name} drawn"
