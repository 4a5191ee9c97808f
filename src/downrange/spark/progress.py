"""The lag of a stream, from the progress that Spark reports after each batch.

query = orders.writeStream.start()
lag_of(query.lastProgress)          # <Lag 120 messages in 4 queues>

spark.streams.addListener(LagListener(lambda name, lag: print(name, lag.messages)))
spark.streams.addListener(LagListener(namesrv="127.0.0.1:9876"))    # for `downrange pipeline list` and the console
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from downrange.client.config import ClientConfig
from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.model.message import MessageQueue
from downrange.spark.errors import SparkSourceError
from downrange.spark.offsets import Offsets, from_json

log = logging.getLogger(__name__)

KIND: Final = "stream"


@dataclass(frozen=True, slots=True)
class Lag:
    """Messages that existed when a batch was planned, but that a later batch will read."""

    by_queue: dict[MessageQueue, int]

    @property
    def messages(self) -> int:
        return sum(self.by_queue.values())

    def __repr__(self) -> str:
        return f"<Lag {self.messages} messages in {sum(lag > 0 for lag in self.by_queue.values())} queues>"


def lag_of(progress: Mapping[str, Any] | Any) -> Lag | None:
    """The lag of a query over all its `rocketmq` sources; None without such a source, or before the first batch."""
    sources = progress["sources"] if isinstance(progress, Mapping) else progress.sources
    found: dict[MessageQueue, int] = {}
    is_ours = False
    for source in sources:
        end, latest = _offsets(_field(source, "endOffset")), _offsets(_field(source, "latestOffset"))
        if end is not None and latest is not None:
            is_ours = True
            for queue, offset in latest.items():
                found[queue] = found.get(queue, 0) + max(0, offset - end.get(queue, 0))
    return Lag(found) if is_ours else None


def _field(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def _offsets(value: Any) -> Offsets | None:
    """Our offsets; None for those of another source. Spark gives them as JSON text or as parsed JSON."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        return from_json(parsed) if isinstance(parsed, Mapping) else None
    except (ValueError, SparkSourceError):
        return None


class LagListener(StreamingQueryListener):
    """Calls `report` with the name (or id) and the lag of a query after every batch; without `report` logs them.

    With `namesrv` it also sends the progress of every query to the topic DOWNRANGE_PIPELINES of that cluster, at most
    once in five seconds a query, and the error with which a query ended.
    """

    def __init__(
        self, report: Callable[[str, Lag], None] | None = None, *, namesrv: str | ClientConfig | None = None
    ) -> None:
        self._report = report or _log
        self._reporter = None if namesrv is None else PipelineReporter(namesrv)
        self._last: dict[str, PipelineStatus] = {}
        """The last status of each running query, by its id."""

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  Spark's names
        self._last[str(event.id)] = PipelineStatus(event.name or str(event.id), KIND)

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        lag = lag_of(event.progress)
        if lag is not None:
            self._report(event.progress.name or str(event.progress.id), lag)
        if self._reporter is not None:
            status = status_of(event.progress, lag)
            self._last[str(event.progress.id)] = status
            self._reporter.tell(status)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        last = self._last.pop(str(event.id), None)
        if self._reporter is not None and last is not None and event.exception:
            self._reporter.tell(replace(last, last_error=str(event.exception).strip().splitlines()[0]))

    def close(self) -> None:
        """Close the connection to the cluster. A query that goes on opens it again."""
        if self._reporter is not None:
            self._reporter.close()


def lag_by_topic(lag: Lag) -> dict[str, int]:
    """The messages of each topic that were not read yet."""
    found: dict[str, int] = {}
    for queue, behind in lag.by_queue.items():
        found[queue.topic] = found.get(queue.topic, 0) + behind
    return found


def status_of(progress: Any, lag: Lag | None) -> PipelineStatus:
    """The status of a query out of the progress that Spark reports."""
    millis = progress.durationMs.get("triggerExecution") if progress.durationMs else None
    return PipelineStatus(
        progress.name or str(progress.id),
        KIND,
        source=", ".join(str(source.description) for source in progress.sources),
        target=str(progress.sink.description) if progress.sink is not None else "",
        lag={} if lag is None else lag_by_topic(lag),
        rows_per_second=_finite(progress.processedRowsPerSecond),
        batch_seconds=None if millis is None else millis / 1000,
    )


def _finite(rate: float | None) -> float | None:
    """The rate; None where Spark divided by nothing."""
    return rate if rate is not None and math.isfinite(rate) else None


def _log(name: str, lag: Lag) -> None:
    log.info("stream lag query=%s messages=%d queues=%d", name, lag.messages, len(lag.by_queue))
