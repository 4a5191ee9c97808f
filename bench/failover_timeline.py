"""One failover second by second: acknowledgements, latencies, and what happened when."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.failover_load import FailoverLoad

BEFORE_SECONDS: Final = 1.0
BUCKET_SECONDS: Final = 0.05


def timeline(events: Sequence[tuple[str, float]], load: FailoverLoad) -> dict[str, Any]:
    """A round as it stands in the results, in seconds from the fault on; `events` begins with the fault."""
    origin, end = events[0][1], events[-1][1]
    events = sorted([*events, ("acknowledged again", load.longest_gap(origin, end)[1])], key=lambda event: event[1])
    begin = origin - BEFORE_SECONDS
    acknowledged = Counter(int((at - origin) // BUCKET_SECONDS) for at in load.acknowledged_at if begin <= at <= end)
    buckets = range(int(-BEFORE_SECONDS / BUCKET_SECONDS), int((end - origin) / BUCKET_SECONDS))
    return {
        "events": [(what, round(at - origin, 3)) for what, at in events],
        "acknowledged": [(round(bucket * BUCKET_SECONDS, 3), acknowledged[bucket]) for bucket in buckets],
        "latencies": [
            (round(at - origin, 3), round(seconds * 1000, 1)) for at, seconds in load.latencies if begin <= at <= end
        ][:20_000],
    }


def draw(path: Path, title: str, line: dict[str, Any]) -> str:
    """Write the picture; the sentence to print, also when it cannot be written."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        return f"{path.name} was not drawn: matplotlib is missing, install it with pip install 'downrange[bench]'"
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(10, 6.4), sharex=True)
    times = [at for at, _ in line["acknowledged"]]
    upper.step(times, [count / BUCKET_SECONDS for _, count in line["acknowledged"]], where="post")
    upper.set_ylabel("acknowledged a second")
    lower.scatter(
        [at for at, _ in line["latencies"]], [max(0.1, millis) for _, millis in line["latencies"]], s=2, linewidths=0
    )
    lower.set_yscale("log")
    lower.set_ylabel("latency of a send, ms")
    lower.set_xlabel("seconds from the fault")
    top = max((count / BUCKET_SECONDS for _, count in line["acknowledged"]), default=1)
    for number, (what, at) in enumerate(line["events"]):
        for axis in (upper, lower):
            axis.axvline(at, color="0.6", linewidth=0.8, linestyle="--", zorder=0)
        side = "right" if at > times[-1] * 0.7 else "left"
        upper.annotate(f"{at:.2f} s {what}", (at, top * (0.95 - 0.12 * (number % 7))), fontsize=8, ha=side)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return f"{path.name} drawn"
