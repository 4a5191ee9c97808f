"""Removes the oldest files of the log, queue and index files that point at them, and unwanted queues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from downrange.model.message import TopicQueue
from downrange.model.topics import OP_HALF_TOPIC, SCHEDULE_TOPIC, TABLE_TOPIC, TIMER_TOPIC
from downrange.store.errors import StoreClosed
from downrange.store.files import Files
from downrange.store.flushing import Flushing
from downrange.store.index.key_index import KeyIndex
from downrange.store.log.segments import Segments
from downrange.store.queue.queues import ConsumeQueues
from downrange.store.refusals import Refusals

log = logging.getLogger(__name__)

_LMQ_PREFIX: Final = "%LMQ%"


@dataclass(eq=False)
class Removal:
    """Removes files; `retention.py` decides which are old enough.

    Holds always: a log file is removed only after the queue entries of its messages are on disk. `remove_files` may run
    in a worker thread, the other methods are for the store's own.
    """

    _segments: Segments
    _queues: ConsumeQueues
    _index: KeyIndex | None
    _flushing: Flushing
    _refusals: Refusals
    _files: Files

    def take_oldest_files(self, count: int) -> list[Path]:
        """Take the first files out of the log, but never the last; `remove_files` then deletes them."""
        taken = []
        for _ in range(count):
            if self._segments.min_offset + self._segments.file_size > self._flushing.queues_safe_up_to:
                # Queue entries of these messages may be in memory only. If they were lost together with the log from
                # which they can be rebuilt, a restart would give their queue offsets to other messages.
                self._flushing.flush_all_queues()
            path = self._segments.take_oldest()
            if path is None:
                break
            taken.append(path)
        return taken

    def remove_files(self, paths: Iterable[Path]) -> None:
        """Delete files, in any thread. A file that cannot be deleted is part of the log again at the next start."""
        for path in paths:
            try:
                self._files.remove(path)
            except OSError as error:
                log.error("cannot remove %s: %s", path, error.strerror or error)

    def delete_dependents(self) -> int:
        """Remove queue and index files that only point at deleted messages; correct the first offsets of queues."""
        minimum = self._segments.min_offset
        removed = self._queues.delete_expired(minimum)
        if self._index is not None:
            removed += self._index.delete_expired(minimum)
        return removed

    def remove_expired_queues(self) -> list[TopicQueue]:
        """Remove queues all of whose messages are gone (request 306)."""
        minimum = self._segments.min_offset
        return self._remove(lambda topic, _, end: topic not in (SCHEDULE_TOPIC, TIMER_TOPIC) and 0 < end < minimum)

    def remove_unused_topics(self, topics: Iterable[str]) -> list[TopicQueue]:
        """Remove queues of topics that are not among `topics` (request 316; after deleting a topic, 215)."""
        kept = {*topics, SCHEDULE_TOPIC, TIMER_TOPIC, OP_HALF_TOPIC, TABLE_TOPIC}
        return self._remove(lambda topic, *_: topic not in kept and not topic.startswith(_LMQ_PREFIX))

    def remove_topic(self, topic: str) -> list[TopicQueue]:
        return self._remove(lambda name, *_: name == topic)

    def _remove(self, is_unwanted: Callable[[str, int, int], bool]) -> list[TopicQueue]:
        closed = self._refusals.get("closed")
        if closed is not None:
            raise StoreClosed(closed)
        return [TopicQueue(state.topic, state.queue_id) for state in self._queues.remove_where(is_unwanted)]
