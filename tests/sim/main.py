"""`python -m tests.sim 1-200`: run seeds one after another, and stop at the first that fails."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from tests.sim.run import Outcome, run, shrink

SHOWN_PROBLEMS = 10


def seeds_of(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
        raise SystemExit(f"not seeds: {text!r}; expected one number or a range, as 7 or 1-200")
    return range(int(first), int(last or first) + 1)


def report(outcome: Outcome) -> None:
    print(f"seed {outcome.seed} failed: {outcome.summary}")
    for problem in outcome.problems[:SHOWN_PROBLEMS]:
        print(f"  {problem}")
    shrunk = shrink(outcome)
    print(f"with {len(shrunk.faults)} of {len(outcome.faults)} faults it fails as well:")
    for fault in shrunk.faults:
        print(f"  {fault}")
    for problem in shrunk.problems[:SHOWN_PROBLEMS]:
        print(f"  {problem}")


def main(arguments: Sequence[str]) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings have the same order in every run then
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.sim", *arguments])
    if len(arguments) != 1:
        raise SystemExit("usage: python -m tests.sim SEEDS, one number or a range, as 7 or 1-200")
    logging.disable()
    seeds = seeds_of(arguments[0])
    simulated = used = 0.0
    for number, seed in enumerate(seeds):
        outcome = run(seed)
        simulated += outcome.simulated_seconds
        used += outcome.cpu_seconds
        if not outcome.is_good:
            report(outcome)
            print(f"{number} of {len(seeds)} seeds passed; seed {seed} failed")
            return 1
    print(f"{simulated:.0f} s simulated in {used:.1f} s of CPU time: {simulated / max(used, 1e-9):.0f} times as fast")
    print(f"{len(seeds)} of {len(seeds)} seeds passed")
    return 0
