"""The lag of a stream, from the progress that Spark reports after each batch.

query = orders.writeStream.start()
lag_of(query.lastProgress)          # <Lag 120 messages in 4 queues>

spark.streams.addListener(LagListener(lambda name, lag: print(name, lag.messages)))
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from downrange.model.message import MessageQueue
from downrange.spark.errors import SparkSourceError
from downrange.spark.offsets import Offsets, from_json

log = logging.getLogger(__name__)


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
    """Calls `report` with the name (or id) and the lag of a query after every batch; without `report` logs them."""

    def __init__(self, report: Callable[[str, Lag], None] | None = None) -> None:
        self._report = report or _log

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802  Spark's names
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        lag = lag_of(event.progress)
        if lag is not None:
            self._report(event.progress.name or str(event.progress.id), lag)

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        pass


def _log(name: str, lag: Lag) -> None:
    log.info("stream lag query=%s messages=%d queues=%d", name, lag.messages, len(lag.by_queue))
