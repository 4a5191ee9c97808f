"""`python -m tests.chaos`: real faults against real processes, row by row of docs/reference/scorecard.md.

Each row goes on from its last result until its figure, times --scale, is reached or its share of --minutes is over.
Ctrl-C loses the rounds that are running, nothing else. The exit code is 1 if a row found something wrong.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.chaos.lanes import Lanes, play
from tests.chaos.result import RESULTS, Result, load, path_of, save
from tests.chaos.row import Played, Row
from tests.chaos.table import ROWS

MOST_MINUTES: Final = 60.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="numbers of rows; all if none is named")
    parser.add_argument("--minutes", type=float, default=MOST_MINUTES, help="for all rows together (default: 60)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the asked figures to reach (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these rows")
    parser.add_argument("--seed", type=int, help="of the first round, to see a failure again; its result is not kept")
    parser.add_argument("--number", type=int, default=0, help="of that round: row 4 tries other states in each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory of the JSON results")
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - {row.number for row in ROWS}:
        parser.error(f"there is no row {min(unknown)}; rows are 1 to {len(ROWS)}")
    chosen = [row for row in ROWS if not options.rows or row.number in options.rows]
    if options.seed is not None:
        return _again(chosen, options.seed, options.number, options.minutes * 60)
    logging.disable()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes and mounts of a round are cleared away, too
    played = failed = 0
    deadline = time.monotonic() + options.minutes * 60
    for place, row in enumerate(chosen):
        seconds = (deadline - time.monotonic()) / (len(chosen) - place)
        if why := row.missing() or ("" if seconds > 0 else "the time is over"):
            print(f"row {row.number} ({row.name}) is left out: {why}")
            continue
        if options.fresh:
            path_of(row, options.results).unlink(missing_ok=True)
        played += 1
        try:
            failed += bool(_carry_out(row, options.results, options.scale, seconds).failed_rounds)
        except KeyboardInterrupt:
            print(f"interrupted in row {row.number}; the same command goes on with it")
            return 130
    print(f"{played - failed} of {len(chosen)} rows were played and have found nothing wrong")
    return 1 if failed else 0


def _carry_out(row: Row, results: Path, scale: float, seconds: float) -> Result:
    result = load(row, results)
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    with Lanes(row) as lanes:
        number = result.rounds
        while True:
            is_over = row.is_reached(result.figures, scale) or time.monotonic() >= deadline or result.failed_rounds
            if not is_over and lanes.have_room:
                lanes.start(number, deadline)
                number += 1
                continue
            if not lanes:
                return result
            for seed, played in lanes.ended():
                began, before = time.monotonic(), began
                result.add(seed, played, began - before)
                save(row, result, results)
                _tell(row, result, played)


def _again(rows: Sequence[Row], seed: int, number: int, seconds: float) -> int:
    """Play one round of each row with a seed that is known."""
    wrong = 0
    for row in rows:
        result = Result(row=row.number, name=row.name)
        played = play(row, seed, number, seconds)
        result.add(seed, played, 0.0)
        _tell(row, result, played)
        wrong += len(played.wrong)
    return 1 if wrong else 0


def _tell(row: Row, result: Result, played: Played) -> None:
    figures = ", ".join(f"{figure:,.0f} {name}" for name, figure in result.figures.items())
    measured = "".join(f", {name} {figure:,.1f}" for name, figure in result.measured.items())
    print(f"row {row.number} {row.name}: {figures}{measured} in {result.seconds:.0f} s", flush=True)
    for text in played.wrong[:10]:
        print(f"  WRONG: {text}", file=sys.stderr, flush=True)
