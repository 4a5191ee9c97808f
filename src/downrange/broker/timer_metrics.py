"""How many timer messages wait, by topic, and how many came and went. [TimerMetrics]"""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Final

from downrange.broker.json_file import JsonFile, SavedTable
from downrange.clock import Clock
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.timer import TimerMetricsTable, TimingCount
from downrange.settings import ConfigError

log = logging.getLogger(__name__)

_SAMPLES: Final = 11  # seconds


class TimerMetrics(SavedTable):
    """The table `config/timermetrics`, and counters of this run. Counts may be a little off after a crash."""

    def __init__(self, file: JsonFile, clock: Clock) -> None:
        super().__init__(file)
        self._clock = clock
        try:
            saved = file.load(TimerMetricsTable) or TimerMetricsTable()
        except ConfigError as error:  # counts are no reason not to start
            log.warning("counts of timer messages begin at zero reason=%s", error)
            saved = TimerMetricsTable()
        self._version = saved.data_version or DataVersion(state_version=0)
        self._waiting: Counter[str] = Counter({topic: one.count for topic, one in saved.timing_count.items()})
        self._changed = {topic: one.time_stamp for topic, one in saved.timing_count.items()}
        self.enqueue_total: Counter[str] = Counter()
        self.dequeue_total: Counter[str] = Counter()
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=_SAMPLES)

    @property
    def waiting(self) -> int:
        """How many messages wait in all."""
        return sum(max(0, count) for count in self._waiting.values())

    def waiting_by_topic(self) -> dict[str, int]:
        return {topic: max(0, count) for topic, count in self._waiting.items()}

    def enqueued(self, topic: str, count: int = 1) -> None:
        """Messages were put on the wheel."""
        self.enqueue_total[topic] += count
        self._waiting[topic] += count

    def dequeued(self, topic: str, count: int = 1) -> None:
        """Messages were delivered, or stored in the timer topic again."""
        self.dequeue_total[topic] += count
        self._waiting[topic] -= count

    def left(self, topic: str) -> None:
        """A message waits no longer, and is not delivered."""
        self._waiting[topic] -= 1

    def sample(self) -> None:
        """Note the totals; to be called every second."""
        totals = self.enqueue_total.total(), self.dequeue_total.total()
        self._samples.append((self._clock.monotonic(), *totals))

    def enqueue_rate(self) -> float:
        """Messages put on the wheel each second, over the last ten seconds."""
        return self._rate(1)

    def dequeue_rate(self) -> float:
        """Messages delivered each second, over the last ten seconds."""
        return self._rate(2)

    def _rate(self, number: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        return (last[number] - first[number]) / seconds if seconds > 0 else 0.0

    def table(self) -> TimerMetricsTable:
        """The table as it is saved, and as request 61 is answered."""
        return TimerMetricsTable(
            data_version=self._version,
            timing_count={
                topic: TimingCount(count=count, time_stamp=self._changed.get(topic, 0))
                for topic, count in self._waiting.items()
            },
        )

    def mark_changed(self) -> None:
        """Counts have changed since the table was saved last."""
        now = self._clock.now()
        self._version = self._version.bumped(now)
        self._changed = dict.fromkeys(self._waiting, now)
        self.mark_unsaved()
