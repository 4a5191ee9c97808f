"""The measured part of a load: after the warm-up, before the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from downrange.load.histogram import Histogram
from downrange.load.report import LoadReport, Moment
from downrange.load.target import Target

if TYPE_CHECKING:
    from downrange.load.sending import Sender


class Timed(Protocol):
    """An object that keeps latencies: a sender, a puller, a schedule."""

    latency: Histogram
    refused: Counter[str]


class Measured:
    """The part of a load between warm-up and end."""

    def __init__(self, sender: Sender, target: Target, started: float, more: Mapping[str, Timed] | None = None) -> None:
        self._sender = sender
        self._timed: dict[str, Timed] = {"reply": sender, **(more or {})}
        self._server = target.server
        self._begin_at = started + sender.plan.warm_up_seconds
        self._end_at = self._begin_at + sender.plan.seconds
        self._begun: Moment | None = None
        self.ended: Moment | None = None

    def look(self, now: float) -> None:
        """Called all the time; starts and ends the measured part when it is time."""
        if self._begun is None and now >= self._begin_at:
            for timed in self._timed.values():
                timed.latency = Histogram()
                timed.refused.clear()
            self._begun = Moment.now(self._server, self._sender.messages)
        elif self._begun is not None and self.ended is None and now >= self._end_at and self._has_answers:
            self.ended = Moment.now(self._server, self._sender.messages)

    @property
    def _has_answers(self) -> bool:
        """Whether there is an answer since the start: without any there would be nothing to measure, so we wait."""
        assert self._begun is not None
        return self._sender.messages > self._begun.messages or bool(self._sender.refused)

    def report(self, workload: str) -> LoadReport:
        assert self._begun is not None
        assert self.ended is not None
        latency = {name: timed.latency for name, timed in self._timed.items()}
        refused = sum((timed.refused for timed in self._timed.values()), Counter[str]())
        return LoadReport.between(workload, self._begun, self.ended, self._server, latency, refused)
