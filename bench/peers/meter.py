"""The measured part of a closed loop, whoever drives it."""

from __future__ import annotations

import time

from downrange.load import Histogram, LoadReport, SendPlan
from downrange.load.report import Moment
from downrange.load.server_process import ServerProcess


class Meter:
    """Counts what was acknowledged after the warm-up and before the time is up. One thread may use it.

    A driver that goes on until `is_over`, and looks at the clock at least at every acknowledgement, gets a report.
    """

    def __init__(self, plan: SendPlan, server: ServerProcess) -> None:
        self._server = server
        self._begins = time.monotonic() + plan.warm_up_seconds
        self._ends = self._begins + plan.seconds
        self._histogram = Histogram()
        self._begun: Moment | None = None
        self._ended: Moment | None = None
        self._messages = 0

    @property
    def is_over(self) -> bool:
        return self._ended is not None

    def look(self) -> None:
        """See what time it is."""
        now = time.monotonic()
        if self._begun is None:
            if now >= self._begins:
                self._histogram = Histogram()
                self._begun = Moment.now(self._server, self._messages)
        elif self._ended is None and now >= self._ends:
            self._ended = Moment.now(self._server, self._messages)

    def record(self, nanos: int, count: int) -> None:
        """So many messages were acknowledged after this time each."""
        self._messages += count
        if self._ended is None:
            self._histogram.record(nanos, count)

    def report(self, workload: str) -> LoadReport:
        assert self._begun is not None
        assert self._ended is not None
        return LoadReport.between(workload, self._begun, self._ended, self._server, {"reply": self._histogram}, {})
