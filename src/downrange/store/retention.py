"""Decides which files may be deleted, by the time and the fill of the disks, and removes them in rounds.

| fill above | effect |
|---|---|
| diskMaxUsedSpaceRatio (75 %) | expired files are deleted at any hour |
| diskSpaceCleanForciblyRatio (85 %) | the oldest files are deleted although not expired |
| diskSpaceWarningLevelRatio (90 %) | messages are refused, too |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

from downrange.store.config import StoreConfig
from downrange.store.message_store import MessageStore

log = logging.getLogger(__name__)

FILES_PER_ROUND: Final = 10
MANUAL_ROUNDS: Final = 20
_HOUR_MILLIS: Final = 3_600_000


class Decision(NamedTuple):
    """The decision about one clean-up round: whether it deletes files, also unexpired ones, and why."""

    delete: bool
    forced: bool
    disk_full: bool
    reason: str


def local_hour(now: int) -> int:
    return time.localtime(now / 1000).tm_hour


def decide(
    config: StoreConfig, *, hour: int, commit_log_use: float, queue_use: float, manual: bool = False
) -> Decision:
    """Decide for one moment. A negative fill means that the path is missing, which is a reason to clean up."""
    forced = disk_full = space = False
    for use in (commit_log_use, queue_use):
        disk_full = disk_full or use * 100 > config.disk_space_warning_level_ratio
        forced = forced or use * 100 > config.disk_space_clean_forcibly_ratio
        space = space or use < 0 or use * 100 > config.disk_max_used_space_ratio
    forced = (forced or disk_full) and config.clean_file_forcibly_enable
    reasons = [
        text
        for holds, text in (
            (hour in config.delete_hours(), f"hour {hour:02d} is in deleteWhen"),
            (space, f"disks are {commit_log_use:.0%} and {queue_use:.0%} full"),
            (manual, "requested by an operator"),
        )
        if holds
    ]
    return Decision(bool(reasons), forced and bool(reasons), disk_full, ", ".join(reasons))


def count_expired(
    file_times: Iterable[int], now: int, reserved_hours: int, *, forced: bool, most: int = FILES_PER_ROUND
) -> int:
    """The number of oldest files to delete: all before the first that is not expired, but never the newest."""
    count = 0
    for changed in list(file_times)[:-1]:
        if count == most or not (forced or now >= changed + reserved_hours * _HOUR_MILLIS):
            break
        count += 1
    return count


class Retention:
    """Clean-up rounds: `judge`, then remove the files, perhaps in a worker thread, then `clean_dependents`."""

    def __init__(self, store: MessageStore, *, hour_of: Callable[[int], int] = local_hour) -> None:
        self._store = store
        self._hour_of = hour_of
        self._manual_rounds = 0
        self._cleaned_up_to = store.min_offset

    def arm_manually(self) -> None:
        """Let the next rounds delete expired files at any hour (request 329)."""
        self._manual_rounds = MANUAL_ROUNDS

    def judge(self, now: int) -> tuple[Decision, list[Path]]:
        """Set or clear the disk-full mark of the store, and take expired files out of the log, in its own thread."""
        store = self._store
        manual = self._manual_rounds > 0
        decision = decide(
            store.config,
            hour=self._hour_of(now),
            commit_log_use=store.commit_log_disk_use,
            queue_use=store.queue_disk_use,
            manual=manual,
        )
        store.set_disk_full(decision.disk_full)
        if not decision.delete:
            return decision, []
        self._manual_rounds -= manual
        reserved = store.config.file_reserved_time
        taken = store.take_oldest_files(count_expired(store.file_times(), now, reserved, forced=decision.forced))
        if taken:
            log.info("commit-log files expired count=%d first=%s reason=%s", len(taken), taken[0], decision.reason)
        return decision, taken

    def clean_dependents(self) -> int:
        """Remove queue and index files that only point at deleted messages. For the store's own thread."""
        if self._store.min_offset <= self._cleaned_up_to:
            return 0
        self._cleaned_up_to = self._store.min_offset
        return self._store.delete_dependents()
