"""Batches of a pipeline whose tasks handle messages themselves, instead of giving rows to Spark.

Passing a row through the JVM costs more than writing it to Parquet. So the driver plans batches with the planner of the
stream source, tasks read their ranges, and what they return is small.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final, NamedTuple

from downrange.model.subscription import parse_tags
from downrange.spark import planner
from downrange.spark.cluster import Cluster
from downrange.spark.offset_resolution import Origins
from downrange.spark.offsets import from_json
from downrange.spark.planner import QueueRange
from downrange.spark.source import StreamReader, Task
from downrange.spark.worker_loop import WorkerLoop

# Starting a second task costs about as much as archiving this many messages.
_WORTH_A_TASK: Final = 20_000


class Look(NamedTuple):
    """The end of a batch, or a look for one: the messages of each topic to go, and how long the batch took."""

    lag: dict[str, int]
    seconds: float | None

    @property
    def behind(self) -> int:
        return sum(self.lag.values())


class TaskReader(StreamReader):
    """Plans batches on the driver, in one thread; copies of it read on workers. `parallelism` is set by the driver."""

    parallelism = 1
    _loop: WorkerLoop | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_loop": None}

    def _origins(self) -> Origins:
        if self._options.store_path is not None:
            return super()._origins()
        # Not the loop of the process: another thread may run another pipeline.
        self._loop = WorkerLoop()
        return Cluster(self._options, self._loop)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = self._opened = None

    def commit_group(self, done: dict[str, Any]) -> None:
        """Commit the end of the last batch as offsets of the group, if this is wanted."""
        self._commit(from_json(done))

    def lag(self, end: dict[str, Any]) -> dict[str, int]:
        """The number of messages of each topic behind `end` when `latestOffset` was last called."""
        latest = self._latest or {}
        found = dict.fromkeys((queue.topic for queue in latest), 0)
        for one in planner.ranges(from_json(end), latest):
            found[one.queue.topic] += one.size
        return found

    def _tasks(self, ranges: Sequence[QueueRange]) -> list[Task]:
        options = self._options
        worth = sum(one.size for one in ranges) // _WORTH_A_TASK
        at_least = options.min_partitions or max(1, min(self.parallelism, worth))
        found = planner.tasks(ranges, most=options.max_records_per_partition, at_least=at_least)
        return [Task(part, parse_tags(options.tags)) for part in found]


def run_batches(
    reader: TaskReader,
    kept: dict[str, Any] | None,
    first: Callable[[], dict[str, Any]],
    handle: Callable[[dict[str, Any], dict[str, Any]], None],
    *,
    seconds: float | None,
    on_look: Callable[[Look], None],
    stop: threading.Event | None,
) -> None:
    """Hand one batch after another, from offset to offset, to `handle`, with `seconds` between them; then close.

    `kept` is where the last run ended, else the first batch begins at `first()`. With `seconds` None it ends when all
    messages that exist now were handled; else, and also before, when `stop` is set. After each batch, and each look for
    one that found no new message, `on_look` is called.
    """
    stop = stop or threading.Event()
    with closing(reader):
        begin = kept or first()
        if seconds is None:
            reader.prepareForTriggerAvailableNow()
        while not stop.is_set():
            began = time.monotonic()
            end = reader.latestOffset(begin, reader.getDefaultReadLimit())
            is_new = end != kept
            if is_new:
                handle(begin, end)
                begin = kept = end
            on_look(Look(reader.lag(end), time.monotonic() - began if is_new else None))
            if seconds is not None:
                stop.wait(began + seconds - time.monotonic())
            elif not is_new:
                break
        reader.commit_group(begin)
