"""The names of files of a lake, what is known about one file, and the errors of a lake. See docs/reference/lake.md.

topic=orders/date=2026-11-15/broker-a-3-00000000000000000000-5f0c….parquet
_delta_log/   the log of the Delta table, which says which files count
_replay/      the progress of replays
"""

from __future__ import annotations

import re
import uuid
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec

from downrange.model.errors import MQError
from downrange.spark.planner import QueueRange

PARTITIONS: Final = ("topic", "date")
REPLAY: Final = "_replay"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class LakeError(MQError):
    """A lake cannot be read or written as requested; the text says why."""


class LakeBusy(LakeError):
    """Another process is doing this work on the lake."""

    retriable = True


class LakeFile(NamedTuple):
    """One Parquet file: its path, relative to the lake, and what its Delta entry says about it."""

    path: str
    topic: str
    date: str
    rows: int
    bytes: int
    low: dict[str, Any]
    """The smallest value of each column that has statistics."""
    high: dict[str, Any]
    nulls: dict[str, int]
    queues: tuple[QueueRange, ...] = ()
    """The messages of each queue in a file that a task has just written; the log does not keep this."""

    @property
    def statistics(self) -> str:
        """The statistics as the log of a Delta table has them."""
        document = {
            "numRecords": self.rows,
            "minValues": self.low,
            "maxValues": self.high,
            "nullCount": self.nulls,
        }
        return msgspec.json.encode(document, enc_hook=str).decode()

    def is_in_span(self, begin_millis: int | None, end_millis: int | None) -> bool:
        """Whether the file may have messages that were stored in the span, ends included."""
        first, last = self.low.get("store_time"), self.high.get("store_time")
        return (begin_millis is None or last is None or _millis(last) >= begin_millis) and (
            end_millis is None or first is None or _millis(first) <= end_millis
        )


def _millis(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) // 1000


def partition_of(topic: str, date: str) -> str:
    """The directory of one topic and day; a topic like `%RETRY%billing` is escaped as Hive does."""
    return f"topic={quote(topic, safe='')}/date={date}"


def file_name(broker: str, queue_id: int, start: int) -> str:
    """A new name for a file, after its first message. It is random: a task may run twice at the same time."""
    return f"{quote(broker, safe='')}-{queue_id}-{start:020}-{uuid.uuid4().hex}.parquet"


def checked_name(name: str) -> str:
    """The name of a pipeline, checked because it becomes part of file names and of the log."""
    if not _NAME.fullmatch(name):
        raise LakeError(f"{name!r} cannot name a pipeline: expected letters, digits, '-', '_' and '.', at most 64")
    return name
