"""Whether compiled code keeps or loses references."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence


def check_no_leaks(once: Callable[[], None], watched: Sequence[object]) -> None:
    """Call `once` again and again: the counts of these objects, and memory, must stay as they are after the first."""
    once()
    gc.collect()
    once()  # what the collector took from Python's lists of free objects is there again
    # A leak grows with every round; threads and caches of other tests do not.
    rounds = [_growth(once, watched) for _ in range(3)]
    assert min(blocks for _, blocks in rounds) < 200, rounds
    assert [] in [held for held, _ in rounds], rounds


def _growth(once: Callable[[], object], watched: Sequence[object]) -> tuple[list[object], int]:
    """Which of the objects have many more references after many calls, and how many blocks more are allocated."""
    before = [sys.getrefcount(one) for one in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(300):
        once()
    gc.collect()
    once()
    held = [one for one, count in zip(watched, before, strict=True) if abs(sys.getrefcount(one) - count) >= 50]
    return held, abs(sys.getallocatedblocks() - blocks)


def is_type_error(call: Callable[..., object], *arguments: object) -> bool:
    """Whether the call raises TypeError; unlike `pytest.raises` it leaves nothing behind for the garbage collector."""
    try:
        call(*arguments)
    except TypeError:
        return True
    return False
