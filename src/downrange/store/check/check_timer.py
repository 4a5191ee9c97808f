"""Verifies the index of timer messages of a store that nobody has open, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from downrange.store.files import OS_FILES
from downrange.store.timer.timer_checkpoint import TimerCheckpoint
from downrange.store.timer.timer_log import UNIT, TimerLog
from downrange.store.timer.timer_wheel import TimerWheel

_USUAL_PRECISION: Final = 1000


def timer_problems(root: Path) -> list[str]:
    """What is wrong with the wheel, the log and the checkpoint: an empty list when nothing is, or none is there."""
    checkpoint = TimerCheckpoint.load(root / "config" / "timercheck")
    paths = sorted(path for path in (root / "timerlog").glob("*") if path.name.isdecimal())
    if checkpoint is None or not paths:
        return []
    log = TimerLog(root / "timerlog", paths[0].stat().st_size, OS_FILES, writable=False)
    log.load()
    log.end = max((position + UNIT.size for position, _ in log.units(log.start)), default=log.start)
    problems = log.check()
    if checkpoint.log_end > log.end:
        problems.append(f"timer log: ends at {log.end}, timercheck says {checkpoint.log_end}")
    wheel = TimerWheel(root / "timerwheel", OS_FILES)
    if not wheel.load(writable=False):
        return [*problems, "timer wheel: is missing, or has another size than 38707200 bytes"]
    precision = checkpoint.precision or _USUAL_PRECISION
    return problems + wheel.check(log.start, log.end, checkpoint.read_time // precision)
