"""A histogram for many latencies: counts in buckets whose width grows with the value."""

from __future__ import annotations

from typing import Final

_PRECISION_BITS: Final = 7  # buckets are at most 1/64 of their value wide
_LINEAR: Final = 1 << _PRECISION_BITS
_LONGEST: Final = (1 << 63) - 1  # 292 years


class Histogram:
    """Counts of latencies in nanoseconds, with an error of at most 1.6 per cent; the largest is kept exactly.

    For one thread.
    """

    def __init__(self) -> None:
        self._counts = [0] * (_bucket(_LONGEST) + 1)
        self.count = 0
        self.total = 0
        self.largest = 0

    def __repr__(self) -> str:
        return f"<Histogram {self.count} values, p50 {self.percentile(50):.0f} ns, largest {self.largest} ns>"

    def record(self, nanos: int, times: int = 1) -> None:
        if nanos < 0:
            nanos = 0
        self._counts[_bucket(nanos)] += times
        self.count += times
        self.total += nanos * times
        if nanos > self.largest:  # called for every message: `max` takes twice as long
            self.largest = nanos

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all values do not exceed; 0 when there is none."""
        wanted = self.count * percent / 100
        seen = 0
        for bucket, times in enumerate(self._counts):
            seen += times
            if times and seen >= wanted:
                return min(_middle(bucket), float(self.largest))
        return float(self.largest)


def _bucket(nanos: int) -> int:
    """The bucket of a value: each small value has its own; above, each power of two has 64."""
    shift = nanos.bit_length() - _PRECISION_BITS
    return nanos if shift <= 0 else shift * _LINEAR + (nanos >> shift)


def _middle(bucket: int) -> float:
    shift, value = divmod(bucket, _LINEAR)
    return (value << shift) + ((1 << shift) - 1) / 2
