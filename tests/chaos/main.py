"""`python -m tests.chaos`: real faults against real processes, row by row of docs/reference/scorecard.md.

Each row goes on from its last result until its figure, times --scale, is reached or its share of --minutes is over.
Ctrl-C loses the round that is running, nothing else. The exit code is 1 if a row found something wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from downrange.transport.loop import run as run_loop
from tests.chaos.result import RESULTS, Result, load, path_of, save
from tests.chaos.row import Round, Row
from tests.chaos.table import ROWS
from tests.sim.run import IN_MEMORY

MOST_MINUTES: Final = 60.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, metavar="ROW", help="numbers of rows; all if none is named")
    parser.add_argument("--minutes", type=float, default=MOST_MINUTES, help="for all rows together (default: 60)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the asked figures to reach (default: 1)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these rows")
    parser.add_argument("--seed", type=int, help="of the first round, to see a failure again; its result is not kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the directory of the JSON results")
    options = parser.parse_args(arguments)
    if unknown := set(options.rows) - {row.number for row in ROWS}:
        parser.error(f"there is no row {min(unknown)}; rows are 1 to {len(ROWS)}")
    chosen = [row for row in ROWS if not options.rows or row.number in options.rows]
    if options.seed is not None:
        return _again(chosen, options.seed, options.minutes * 60)
    logging.disable()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes and mounts of a round are cleared away, too
    failed = 0
    for place, row in enumerate(chosen):
        began = time.monotonic()
        if options.fresh:
            path_of(row, options.results).unlink(missing_ok=True)
        result = _carry_out(row, options.results, options.scale, options.minutes * 60 / (len(chosen) - place))
        options.minutes -= (time.monotonic() - began) / 60
        failed += bool(result.failed_rounds)
    print(f"{len(chosen) - failed} of {len(chosen)} rows have found nothing wrong")
    return 1 if failed else 0


def _carry_out(row: Row, results: Path, scale: float, seconds: float) -> Result:
    result = load(row, results)
    deadline = time.monotonic() + seconds
    if row.needs_root and os.geteuid() != 0:
        print(f"row {row.number} ({row.name}) needs the rights of root: left out")
        return result
    while not row.is_reached(result.figures, scale) and time.monotonic() < deadline and not result.failed_rounds:
        seed = random.SystemRandom().randrange(1 << 32)
        began = time.monotonic()
        played = _play(row, seed, result, deadline - began)
        result.add(seed, played, time.monotonic() - began)
        save(row, result, results)
        _tell(row, result, played)
    return result


def _again(rows: Sequence[Row], seed: int, seconds: float) -> int:
    """Play one round of each row with a seed that is known."""
    wrong = 0
    for row in rows:
        result = Result(row=row.number, name=row.name)
        played = _play(row, seed, result, seconds)
        result.add(seed, played, 0.0)
        _tell(row, result, played)
        wrong += len(played.wrong)
    return 1 if wrong else 0


def _play(row: Row, seed: int, result: Result, seconds_left: float) -> Round:
    parent = IN_MEMORY if row.in_memory and IN_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="downrange-chaos-", dir=parent))
    played = Round(directory, random.Random(seed), dict(result.figures), seconds_left)
    try:
        run_loop(_awaited(row, played))
    except Exception as error:  # whatever goes wrong in a round is a finding
        traceback.print_exc()
        played.wrong.append(f"the round broke: {error!r}"[:2000])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return played


async def _awaited(row: Row, played: Round) -> None:
    async with asyncio.timeout(3600):
        await row.play(played)


def _tell(row: Row, result: Result, played: Round) -> None:
    figures = ", ".join(f"{figure:,.0f} {name}" for name, figure in result.figures.items())
    measured = "".join(f", {name} {figure:,.1f}" for name, figure in result.measured.items())
    print(f"row {row.number} {row.name}: {figures}{measured} in {result.seconds:.0f} s", flush=True)
    for text in played.wrong[:10]:
        print(f"  WRONG: {text}", file=sys.stderr, flush=True)
