"""`python -m tests.sim 1-200`: run seeds, and tell those that fail."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

from tests.sim.clients import MESSAGES_IN_A_SECOND
from tests.sim.run import Outcome, run, run_side_by_side, shrink
from tests.sim.speed import simulated_per_cpu_second

SHOWN_PROBLEMS: Final = 10
PROGRESS_SEEDS: Final = 100


def seeds_of(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise argparse.ArgumentTypeError(f"not seeds: {text!r}; expected one number or a range, as 7 or 1-200")
    return range(int(first), int(last or first) + 1)


def report(outcome: Outcome) -> None:
    """Tell how a seed failed, and which of its faults that takes."""
    print(f"seed {outcome.seed} failed: {outcome.summary}")
    _print_problems(outcome)
    shrunk = shrink(outcome)
    print(f"it also fails with {len(shrunk.faults)} of its {len(outcome.faults)} faults:")
    for fault in shrunk.faults:
        print(f"  {fault}")
    _print_problems(shrunk)


def _print_problems(outcome: Outcome) -> None:
    for problem in outcome.problems[:SHOWN_PROBLEMS]:
        print(f"  {problem}")
    if len(outcome.problems) > SHOWN_PROBLEMS:
        print(f"  and {len(outcome.problems) - SHOWN_PROBLEMS} more")


def run_all(seeds: range, jobs: int, *, keeps_going: bool) -> int:
    """Run seeds, so many at a time. The first that fails ends the run, unless the run keeps going."""
    simulated = used = 0.0
    failed: list[int] = []
    for number, outcome in enumerate(run_side_by_side(seeds, jobs), 1):
        simulated += outcome.simulated_seconds
        used += outcome.cpu_seconds
        if not outcome.is_good:
            report(outcome)
            failed.append(outcome.seed)
            if not keeps_going:
                break
        if keeps_going and number % PROGRESS_SEEDS == 0:
            print(f"up to seed {outcome.seed}: {number - len(failed)} of {number} seeds passed", flush=True)
    print(f"{simulated:.0f} s simulated in {used:.1f} s of CPU time: {simulated / max(used, 1e-9):.0f} times as fast")
    if failed:
        print(f"failed: {', '.join(map(str, failed))}")
    print(f"{number - len(failed)} of {len(seeds)} seeds passed")
    return 1 if failed else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seeds", type=seeds_of, nargs="?", default="1-200", help="one number or a range, as 7 or 1-200")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many seeds run at a time")
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after a seed that failed, and tell how far it is"
    )
    parser.add_argument(
        "--speed",
        type=float,
        nargs="?",
        const=MESSAGES_IN_A_SECOND,
        metavar="RATE",
        help="measure a cluster of five processes without faults; RATE messages in a second (default: 2)",
    )
    parser.add_argument("--history", action="store_true", help="print the history of the first seed, line by line")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have one order in all runs then
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *arguments])  # noqa: S606
    logging.disable()
    if options.speed:
        print(
            f"five processes: {simulated_per_cpu_second(options.speed):.0f} simulated seconds in a second of CPU time"
        )
        return 0
    if options.history:
        print(run(options.seeds[0]).history.decode())
        return 0
    return run_all(options.seeds, options.jobs, keeps_going=options.keep_going)
