"""Writes docs/reference/scorecard.md from the committed results: `python -m tests.chaos.scorecard`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.chaos.result import RESULTS, Result, load
from tests.chaos.row import Row
from tests.chaos.table import ROWS

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "scorecard.md"

_HEAD: Final = """# Scorecard: faults survived

Real processes on a real kernel are broken in thirteen ways while real clients work. Rows with clients end with the
history checker of [the simulation](simulation.md#checks): every acknowledged send is read after the drain,
nothing is read that was not sent, one offset holds one message, order is kept. This page is generated from the results
of the runs (`tests/chaos/results/*.json`) by `python -m tests.chaos.scorecard`; figures are sums of all rounds so far.

`make chaos` runs all rows for an hour, `make chaos ROWS="1 7" MINUTES=10` some of them, and `SCALE=0.01` stops at a
hundredth of the asked figures. Each run goes on where the last one ended (`FRESH=1` begins anew). A row that found
something wrong stops and keeps it with the seed of the round; the exit code is then 1. `python -m tests.chaos 7 --seed
4711` plays one round of a row with a seed. Up to eight rounds of a row run side by side, because most of them wait for
most of their time. Rows 2, 3 and 8 need root, rows 2 and 3 also `mkfs.xfs`.
"""
_TAIL: Final = """
*Long run* is the time that the asked figure would take at the pace of the runs so far, on the machine named below.

## Rounds, row by row
"""


def page(directory: Path = RESULTS) -> str:
    results = [(row, load(row, directory)) for row in ROWS]
    lines = [_HEAD, "| # | fault | promise | asked | reached | wrong | long run |", "|---|---|---|---|---|---|---|"]
    lines += [_line(row, result) for row, result in results]
    lines.append(_TAIL)
    lines += [
        f"{row.number}. {row.how[0].upper()}{row.how[1:]}. {_measured(result)}".rstrip() for row, result in results
    ]
    if wrong := [(row, text) for row, result in results for text in result.faults]:
        lines += ["", "## Faults found", ""]
        lines += [f"- row {row.number}: {text.splitlines()[0][:300]}" for row, text in wrong]
    machines = {_machine(result) for _, result in results if result.machine}
    lines += ["", "## Machine", "", *sorted(machines)]
    return "\n".join(lines) + "\n"


def _line(row: Row, result: Result) -> str:
    asked = ", ".join(f"{figure:,} {name}" for name, figure in row.asked.items())
    reached, wrong = "not run", ""
    if result.rounds:
        reached = ", ".join(f"{result.figures.get(name, 0):,.0f} {name}" for name in row.asked)
        wrong = f"{result.failed_rounds} of {result.rounds} rounds" if result.failed_rounds else "0"
    return f"| {row.number} | {row.fault} | {row.promise} | {asked} | {reached} | {wrong} | {_long_run(row, result)} |"


def _long_run(row: Row, result: Result) -> str:
    shares = [result.figures.get(name, 0) / figure for name, figure in row.asked.items()]
    if not result.rounds or not min(shares):
        return ""
    if min(shares) >= 1:
        return "done"
    minutes = result.seconds / min(shares) / 60
    return f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min"


def _how(row: Row, result: Result) -> str:
    return f"{row.number}. {row.how[0].upper()}{row.how[1:]}. {_measured(result)}".rstrip()


def _measured(result: Result) -> str:
    others = {name: figure for name, figure in result.figures.items() if figure} | result.measured
    if not others:
        return ""
    told = ", ".join(f"{name} {figure:,.10g}" for name, figure in others.items())
    return f"In {result.rounds} rounds and {result.seconds:,.0f} s: {told}."


def _machine(result: Result) -> str:
    of = result.machine
    size = f"{of['cpu']}, {of['cores']} cores, {of['memory_gib']} GiB"
    return f"{size}, Linux {of['kernel']}, Python {of['python']}; shared with other work."


if __name__ == "__main__":
    PAGE.write_text(page())
