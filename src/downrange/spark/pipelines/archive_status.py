"""What an archive tells the cluster about itself, for `downrange pipeline list` and the console."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.clock import Clock
from downrange.spark.pipelines.archive import ArchiveProgress


def archive_status(
    reporter: PipelineReporter,
    name: str,
    options: Mapping[str, str],
    lake: str,
    clock: Clock,
    *,
    kind: str = "archive",
) -> Callable[[ArchiveProgress], None]:
    """A callback for `archive(on_progress=…)` that tells the progress since it was told last."""
    topics = options.get("subscribe") or options.get("subscribePattern") or ""
    began = clock.monotonic()
    messages = size = 0

    def tell(progress: ArchiveProgress) -> None:
        nonlocal began, messages, size
        now = clock.monotonic()
        seconds = max(now - began, 1e-9)
        status = PipelineStatus(
            name,
            kind,
            source=topics,
            target=lake,
            lag={} if progress.behind is None else {topics: progress.behind},
            rows_per_second=(progress.messages - messages) / seconds,
            bytes_per_second=(progress.bytes - size) / seconds,
        )
        if reporter.tell(status):
            began, messages, size = now, progress.messages, progress.bytes

    return tell
