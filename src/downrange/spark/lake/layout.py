"""The names of files and directories of a lake. See docs/reference/lake.md.

    topic=orders/date=2026-11-15/broker-a-3-00000000000000000000-00000000000000000999.parquet
    _manifest/        which files count
    _temporary/NAME/  files being written; no name there ends with .parquet, so that no glob finds them
    _replay/          the progress of replays

Readers of partitioned Parquet ignore names that begin with an underscore.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from downrange.model.errors import MQError

MANIFEST: Final = "_manifest"
TEMPORARY: Final = "_temporary"
REPLAY: Final = "_replay"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class LakeError(MQError):
    """A lake cannot be read or written as requested; the text says why."""


class LakeBusy(LakeError):
    """Another process is doing this work on the lake already."""

    retriable = True


def partition_of(topic: str, date: str) -> str:
    """The directory of one topic and day; a topic like `%RETRY%billing` is escaped as Hive does."""
    return f"topic={quote(topic, safe='')}/date={date}"


def file_name(broker: str, queue_id: int, start: int, end: int) -> str:
    """The name of a file with the messages from `start` to before `end` of a queue, with its first and last offset."""
    return f"{quote(broker, safe='')}-{queue_id}-{start:020}-{end - 1:020}.parquet"


def checked_name(name: str) -> str:
    """The name of a pipeline, checked because it becomes the name of a directory."""
    if not _NAME.fullmatch(name):
        raise LakeError(f"{name!r} cannot name a pipeline: expected letters, digits, '-', '_' and '.', at most 64")
    return name
