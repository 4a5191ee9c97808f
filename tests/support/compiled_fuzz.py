"""`python -m tests.support.compiled_fuzz SECONDS [SEED]`: the checks of the compiled twins, again and again.

Round n has the seed SEED + n, so what a run found comes again with the SEED that it printed.
"""

from __future__ import annotations

import sys
import time
from random import Random
from tempfile import TemporaryDirectory

from downrange.compiled import VARIANT
from tests.support import compiled_cases as cases
from tests.support import compiled_checks as checks


def run(seconds: float, seed: int) -> int:
    """How many rounds there was time for."""
    golden = list(cases.golden_sends())
    end = time.monotonic() + seconds
    rounds = 0
    while time.monotonic() < end:
        random = Random(seed + rounds)
        for whole in (cases.frame(random), random.choice(golden)):
            checks.same_header(whole)
            for _ in range(20):
                checks.same_header(cases.broken(random, whole))
        for _ in range(5):
            checks.same_replies(random)
            checks.refuses_nonsense(random)
        if rounds % 10 == 0:
            with TemporaryDirectory() as root:
                checks.same_files(random, root)
        rounds += 1
    return rounds


if __name__ == "__main__":
    assert VARIANT == "compiled", "there is nothing to compare: build it first"
    first = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    print("seed", first, flush=True)
    print(run(float(sys.argv[1]), first), "rounds")
