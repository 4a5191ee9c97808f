"""Writes docs/reference/scorecard.md from the committed results: `python -m tests.chaos.scorecard`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.chaos.result import RESULTS, Result, load
from tests.chaos.row import Row
from tests.chaos.table import ROWS

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "scorecard.md"

_HEAD: Final = """# Scorecard: faults survived

These tests break real processes on a real kernel in thirteen ways while real clients work. Each row is one way. A row
with clients ends with the history checker of [the simulation](simulation.md#checks). The checker wants that every
acknowledged send is read after the drain, that nothing is read that was not sent, that one offset holds one message,
and that order is kept. `python -m tests.chaos.scorecard` makes this page from the results of the runs
(`tests/chaos/results/*.json`). Figures are sums of all rounds so far.

`make chaos` runs all rows for an hour. `make chaos ROWS="1 7" MINUTES=10` runs two of them for ten minutes.
`SCALE=0.01` stops at a hundredth of the asked figures. Each run goes on where the last one ended; `FRESH=1` begins
anew. When a row finds something wrong, it stops and records the fault with the seed of the round. The exit code is then
1. `python -m tests.chaos 7 --seed 4711` plays one round of row 7 with a seed. Up to twelve rounds of a row run side by
side, because a round mostly waits. Rows 2, 3 and 8 need root. Rows 2 and 3 also need `mkfs.xfs`. A row that lacks what
it needs is left out.
"""
_TAIL: Final = """
*Long run* is the time to reach the asked figure at the pace of the runs so far, on the machine named below.

## Rounds, row by row
"""


def page(directory: Path = RESULTS) -> str:
    results = [(row, load(row, directory)) for row in ROWS]
    lines = [_HEAD, "| # | fault | promise | asked | reached | wrong | long run |", "|---|---|---|---|---|---|---|"]
    lines += [_line(row, result) for row, result in results]
    lines.append(_TAIL)
    lines += [_how(row, result) for row, result in results]
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
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    return f"In {rounds} and {result.seconds:,.0f} s: {told}."


def _machine(result: Result) -> str:
    of = result.machine
    size = f"{of['cpu']}, {of['cores']} cores, {of['memory_gib']} GiB"
    return f"{size}, Linux {of['kernel']}, Python {of['python']}; shared with other work."


if __name__ == "__main__":
    PAGE.write_text(page())
