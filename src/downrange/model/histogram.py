"""Histograms."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

RPC_MILLIS_BOUNDS: Final = (1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
"""Of the time to answer a request, as RocketMQ 5 has them."""


class Histogram:
    """Counts of the values between given bounds, upper bounds inclusive, and the sum of all values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
