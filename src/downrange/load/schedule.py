"""When the messages of an open loop are due."""

from __future__ import annotations

from collections import Counter

from downrange.load.histogram import Histogram


class Schedule:
    """When each message is due. One that could not be sent in time stays due since then: waiting counts as latency.

    `latency` is how late they were sent, all that were sent together as late as the first of them: what the generator,
    or the machine it runs on, adds to every latency that counts from then.
    """

    def __init__(self, rate: float, started: float) -> None:
        self._period = 1 / rate
        self._started = started
        self._sent = 0
        self.latency = Histogram()
        self.refused: Counter[str] = Counter()  # never any

    @property
    def next_due(self) -> float:
        return self._started + self._sent * self._period

    def due(self, now: float, most: int) -> list[int]:
        """The moments, in nanoseconds, of all messages due by now; no more than `most`, the rest later."""
        count = min(int((now - self._started) / self._period) + 1 - self._sent, most)
        if count <= 0:
            return []
        self.latency.record(int((now - self.next_due) * 1e9), count)
        first = self._sent
        self._sent += count
        return [int((self._started + number * self._period) * 1e9) for number in range(first, self._sent)]
