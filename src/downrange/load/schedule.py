"""The times at which the messages of an open loop are due."""

from __future__ import annotations

from collections import Counter

from downrange.load.histogram import Histogram


class Schedule:
    """The times at which messages are due. Latency counts from then, even if a message could not be sent in time.

    `latency` is the delay of sending (for messages sent together, that of the first): the part of each latency that the
    generator or its machine causes.
    """

    def __init__(self, rate: float, started: float) -> None:
        self._period = 1 / rate
        self._started = started
        self._sent = 0
        self.latency = Histogram()
        self.refused: Counter[str] = Counter()  # always empty

    @property
    def next_due(self) -> float:
        return self._started + self._sent * self._period

    def due(self, now: float, most: int) -> list[int]:
        """The times, in nanoseconds, of messages that are due by now, but at most `most` of them."""
        count = min(int((now - self._started) / self._period) + 1 - self._sent, most)
        if count <= 0:
            return []
        self.latency.record(int((now - self.next_due) * 1e9), count)
        first = self._sent
        self._sent += count
        return [int((self._started + number * self._period) * 1e9) for number in range(first, self._sent)]
