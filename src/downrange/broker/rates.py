"""Rates of growing totals, from a sample every second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

_SECONDS_KEPT: Final = 601


class SecondSample(NamedTuple):
    """The totals at one moment."""

    now: int
    put: int
    found: int
    missed: int
    transferred: int


class Rates(NamedTuple):
    """Growth per second over the last 10, 60 and 600 seconds; None if the broker has not run for this long."""

    ten_seconds: float | None
    minute: float | None
    ten_minutes: float | None


class SecondSamples:
    """The totals of the last ten minutes."""

    def __init__(self) -> None:
        self._samples: deque[SecondSample] = deque(maxlen=_SECONDS_KEPT)

    def add(self, sample: SecondSample) -> None:
        self._samples.append(sample)

    def rates(self, total: Callable[[SecondSample], int]) -> Rates:
        return Rates(self._over(10, total), self._over(60, total), self._over(600, total))

    def _over(self, seconds: int, total: Callable[[SecondSample], int]) -> float | None:
        if len(self._samples) <= seconds:
            return None
        first, last = self._samples[-seconds - 1], self._samples[-1]
        elapsed = last.now - first.now
        return (total(last) - total(first)) / elapsed * 1000 if elapsed > 0 else 0.0
