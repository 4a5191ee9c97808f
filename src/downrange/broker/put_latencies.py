"""The time that storing messages took, by minute."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import Final

# Exclusive upper bounds of the put latencies that request 28 shows; before them it shows the count for 0 ms.
LATENCY_BOUNDS: Final = (1, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)


class PutLatencies:
    """Counts of puts by whole milliseconds, for the current minute and for the last full one."""

    def __init__(self) -> None:
        self.counting: defaultdict[int, int] = defaultdict(int)
        self._last: dict[int, int] | None = None

    def end_minute(self) -> None:
        self._last, self.counting = dict(self.counting), defaultdict(int)

    def counts(self) -> tuple[int, ...] | None:
        """The counts of the last minute by LATENCY_BOUNDS, one more than bounds; None in the first minute."""
        if self._last is None:
            return None
        counts = [0] * (len(LATENCY_BOUNDS) + 1)
        for millis, count in self._last.items():
            counts[bisect_right(LATENCY_BOUNDS, millis)] += count
        return tuple(counts)

    def percentile(self, share: float) -> float:
        """The milliseconds that this share of the last minute's puts did not exceed; 0 without puts."""
        latencies = self._last or {}
        rank = int(sum(latencies.values()) * share)
        passed = 0
        for millis in sorted(latencies):
            passed += latencies[millis]
            if passed >= rank:
                return float(millis)
        return 0.0
