"""How fast a consumer pulls and consumes each topic, as tools ask for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from downrange.protocol.bodies.consumers import ConsumeStatus

_SLOT_SECONDS: Final = 10.0
_MINUTE_SLOTS: Final = 6
_HOUR_SLOTS: Final = 360


@dataclass(slots=True)
class _Slot:
    """The counts of ten seconds."""

    start: float
    pulls: int = 0
    pull_seconds: float = 0.0
    pulled: int = 0
    calls: int = 0
    call_seconds: float = 0.0
    consumed: int = 0
    failed: int = 0


@dataclass(slots=True)
class TopicStatistics:
    """One topic. Times are given by the caller, in seconds that never go back."""

    slots: deque[_Slot] = field(default_factory=lambda: deque(maxlen=_HOUR_SLOTS))

    def _slot(self, now: float) -> _Slot:
        if not self.slots or now - self.slots[-1].start >= _SLOT_SECONDS:
            self.slots.append(_Slot(now))
        return self.slots[-1]

    def pulled(self, now: float, seconds: float, messages: int) -> None:
        slot = self._slot(now)
        slot.pulls += 1
        slot.pull_seconds += seconds
        slot.pulled += messages

    def consumed(self, now: float, seconds: float, done: int, failed: int, calls: int) -> None:
        """So many calls of the callback, which took `seconds` together."""
        slot = self._slot(now)
        slot.calls += calls
        slot.call_seconds += seconds
        slot.consumed += done
        slot.failed += failed

    def status(self, now: float) -> ConsumeStatus:
        """Rates and times over the last minute, failures over the last hour."""
        hour = [slot for slot in self.slots if now - slot.start < _SLOT_SECONDS * _HOUR_SLOTS]
        minute = [slot for slot in hour if now - slot.start < _SLOT_SECONDS * _MINUTE_SLOTS]
        seconds = max(now - minute[0].start, 1.0) if minute else 1.0
        pulls = sum(slot.pulls for slot in minute)
        calls = sum(slot.calls for slot in minute)
        return ConsumeStatus(
            pull_rt=sum(slot.pull_seconds for slot in minute) * 1000 / pulls if pulls else 0.0,
            pull_tps=sum(slot.pulled for slot in minute) / seconds,
            consume_rt=sum(slot.call_seconds for slot in minute) * 1000 / calls if calls else 0.0,
            consume_ok_tps=sum(slot.consumed for slot in minute) / seconds,
            consume_failed_tps=sum(slot.failed for slot in minute) / seconds,
            consume_failed_msgs=sum(slot.failed for slot in hour),
        )


class ConsumeStatistics:
    """Topic -> its statistics. Used on the consumer's event loop."""

    def __init__(self) -> None:
        self._topics: dict[str, TopicStatistics] = {}

    def topic(self, topic: str) -> TopicStatistics:
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = TopicStatistics()
        return found

    def table(self, now: float) -> dict[str, ConsumeStatus]:
        return {topic: statistics.status(now) for topic, statistics in self._topics.items()}
