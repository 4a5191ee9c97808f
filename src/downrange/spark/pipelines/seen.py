"""How a pipeline is seen from outside: by what it tells the cluster, and as a consumer group.

Streaming queries are told by spark/progress.py; here are pipelines whose tasks handle messages themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Self

from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.clock import Clock, SystemClock
from downrange.spark.options import SourceOptions
from downrange.spark.pipelines.task_reader import Look

# With these options the user says which group is read as, or that there is no broker that has groups.
_OF_THE_USER: Final = frozenset({"group", "commitgroupoffsets", "storepath"})


def group_of(kind: str, name: str) -> str:
    """The consumer group that shows the progress of a pipeline: `archive_orders`."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{kind}_{name}")


def as_group(options: Mapping[str, str], kind: str, name: str) -> dict[str, str]:
    """Options of the source that commit the progress of a pipeline as a group, unless they name a group themselves."""
    if _OF_THE_USER & {key.lower() for key in options}:
        return dict(options)
    return {**options, "group": group_of(kind, name), "commitGroupOffsets": "true"}


class Reports:
    """Tells the cluster that a pipeline reads how far it is; the error, too, that leaves the `with` block.

    A pipeline that reads a store directory has no cluster to tell.
    """

    def __init__(self, options: SourceOptions, status: PipelineStatus, clock: Clock | None = None) -> None:
        self._status = status
        self._clock = clock or SystemClock()
        self._reporter = None if options.store_path is not None else PipelineReporter(options.client_config())
        self._began = self._clock.monotonic()
        self._counted = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._reporter is not None:
            if isinstance(error, Exception):
                self._reporter.tell_error(self._status, error)
            self._reporter.close()

    def tell(self, look: Look, messages: int, size: int) -> None:
        """Tell the progress; `messages` and bytes of the run until now."""
        if self._reporter is None:
            return
        now = self._clock.monotonic()
        seconds = max(now - self._began, 1e-9)
        self._status = replace(
            self._status,
            lag=look.lag,
            rows_per_second=(messages - self._counted[0]) / seconds,
            bytes_per_second=(size - self._counted[1]) / seconds,
            batch_seconds=self._status.batch_seconds if look.seconds is None else look.seconds,
        )
        if self._reporter.tell(self._status):
            self._began, self._counted = now, (messages, size)
