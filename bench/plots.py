"""Three pictures of a run: sends by messages in flight, latency end to end, and the peers side by side."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench import latency, send
from bench.results import Run

_COLOURS: Final = {"async": "#1f77b4", "sync": "#d62728"}


def draw(run: Run, directory: Path) -> Iterator[str]:
    """Draw what there are figures for; a sentence for each picture."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError:
        yield "no pictures: matplotlib is missing, install it with pip install 'downrange[bench]'"
        return
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    label = " (busy machine)" if run.is_busy else ""
    for name, paint in (("send", _sends), ("latency", _latencies), ("peers", _peers)):
        path = directory / f"latest-{name}.png"
        figure = paint(pyplot, run, label)
        if figure is None:
            path.unlink(missing_ok=True)  # that of an earlier run would pass for this one's
            yield f"{path.name} not drawn: its figures were not measured"
            continue
        figure.tight_layout()
        figure.savefig(path, dpi=90)
        pyplot.close(figure)
        yield f"{path.name} drawn"


def _sends(pyplot: Any, run: Run, label: str) -> Any:
    in_flight = list(send.IN_FLIGHT)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for size, style in zip(send.SIZES, ("-o", "--s"), strict=True):
        for flush, colour in _COLOURS.items():
            names = [send.name(size, count, flush) for count in in_flight]
            rates = [run.figure("send", name) for name in names]
            if None in rates:
                return None
            left.plot(
                in_flight, [rate / 1000 for rate in rates if rate], style, color=colour, label=f"{size} B, {flush}"
            )
            costs = [run.figure("send", f"{name}: server CPU") for name in names]
            right.plot(in_flight, costs, style, color=colour, label=f"{size} B, {flush}")
    for axis, text in ((left, "thousand messages a second"), (right, "server CPU a message, µs")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(in_flight, [str(count) for count in in_flight])
        axis.set_xlabel("messages in flight")
        axis.set_ylabel(text)
        axis.grid(visible=True, alpha=0.3)
    left.set_ylim(bottom=0)
    right.set_yscale("log")
    left.legend(title="body, flush")
    figure.suptitle(f"Send{label}")
    return figure


def _latencies(pyplot: Any, run: Run, label: str) -> Any:
    figure, axis = pyplot.subplots(figsize=(6, 4))
    places = range(len(latency.PERCENTILES))
    for load, colour in zip(latency.LOADS, _COLOURS.values(), strict=True):
        values = [run.figure("latency", f"at {load}: end to end {shown}") for shown in latency.PERCENTILES]
        if None in values:
            return None
        rate = run.figure("latency", f"at {load}: received") or 0
        axis.plot(places, values, "-o", color=colour, label=f"{rate:,.0f} messages/s")
    axis.set_xticks(places, list(latency.PERCENTILES))
    axis.set_yscale("log")
    axis.set_ylabel("ms from due to received")
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    figure.suptitle(f"End to end, 128 B{label}")
    return figure


def _peers(pyplot: Any, run: Run, label: str) -> Any:
    from bench.peers import IN_FLIGHT, OURS, SERVERS, SIZES, figure_name

    rows = [(name, size) for size in SIZES for name in SERVERS]
    in_flight = IN_FLIGHT[-1]
    rates = {row: run.figure("peers", figure_name(*row, in_flight)) for row in rows}
    known = [row for row in rows if rates[row] is not None]
    if all(name.startswith(OURS) for name, _ in known):
        return None
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 0.5 + 0.4 * len(known)), sharey=True)
    labels = [f"{name}, {size} B" for name, size in known]
    colours = ["#1f77b4" if name.startswith(OURS) else "0.6" for name, _ in known]
    left.barh(labels, [(rates[row] or 0) / 1000 for row in known], color=colours)
    left.set_xlabel("thousand messages a second")
    costs = [run.figure("peers", f"{figure_name(*row, in_flight)}: server CPU") for row in known]
    right.barh(labels, costs, color=colours)
    right.set_xlabel("server CPU a message, µs")
    left.invert_yaxis()
    figure.suptitle(f"Send, {in_flight} in flight{label}")
    return figure
