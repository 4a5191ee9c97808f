"""From memory to the disk: log, queues and index, and the checkpoint that vouches for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from downrange.store.checkpoint import Checkpoint
from downrange.store.dispatcher import LogFollower
from downrange.store.errors import FlushFailed
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.segments import storage_error
from downrange.store.refusals import Refusals


class _Progress(NamedTuple):
    """How far queue entries were written: store time of the last one, and the log offset behind its record."""

    timestamp: int
    offset: int


class Flushing:
    """Makes safe what was appended, and says how far that is.

    Holds always: the checkpoint claims nothing that was not synced before; after a failed sync nothing more is taken.
    `write_pending…` is for the store's own thread. The others may run beside it in a worker thread, each in one at a
    time.
    """

    def __init__(
        self, commit_log: CommitLog, follower: LogFollower, checkpoint: Checkpoint, refusals: Refusals
    ) -> None:
        self._commit_log = commit_log
        self._segments = commit_log.segments
        self._follower = follower
        self._queues = follower.dispatcher.queues
        self._index = follower.dispatcher.index
        self._checkpoint = checkpoint
        self._refusals = refusals
        self._written = _Progress(0, 0)
        self.queues_safe_up_to = 0
        """Messages that lie before this offset of the log have queue entries on disk."""

    def __repr__(self) -> str:
        return f"<Flushing log={self._segments.flushed_offset} queues={self.queues_safe_up_to}>"

    def commit(self, least_pages: int = 0) -> bool:
        """Carry the transient pool to the files; True when something became readable (then `dispatch_pending`)."""
        if self._follower.at_once or self._segments.pages_to_commit < least_pages:
            return False
        before = self._commit_log.max_offset
        self._segments.commit()
        return self._commit_log.max_offset > before

    def flush_commit_log(self, least_pages: int = 0) -> int:
        """Sync the log if at least `least_pages` pages are dirty; return the offset up to which it is safe.

        Raises FlushFailed when the disk refuses, now and for ever after; the store then takes no more messages.
        """
        if least_pages and self._segments.dirty_pages < least_pages:
            return self._segments.flushed_offset
        timestamp = self._commit_log.last_store_timestamp
        try:
            flushed = self._segments.flush()
        except FlushFailed as error:
            self._refusals.refuse("flush", str(error))
            raise
        if self._follower.at_once or self._commit_log.max_offset == self._commit_log.wrote_offset:
            self._checkpoint.physic_msg_timestamp = max(self._checkpoint.physic_msg_timestamp, timestamp)
        return flushed

    def write_pending(self) -> None:
        """Write queue entries that wait in memory. For the store's own thread, before `flush_queues`.

        Raises DiskFull, say, when they cannot be written; nothing is lost, and no more is taken until a later call
        gets through.
        """
        for _ in self.write_pending_in_slices():
            pass

    def write_pending_in_slices(self, slice_size: int = 64, least_pages: int = 0) -> Iterator[None]:
        """The same with pauses: thousands of queues take longer than a sender may wait.

        With `least_pages`, and many queues, those that have less to write are left for later: a write takes as long
        for one entry as for hundreds. A thorough flush needs all of them.
        """
        if "queues" in self._refusals:
            least_pages = 0  # only when all were written is it known that they can be
        progress = _Progress(self._follower.dispatcher.last_store_timestamp, self._follower.offset)
        try:
            yield from self._queues.write_pending(slice_size, least_pages)
        except OSError as error:
            failure = storage_error("cannot write consume queues", error)
            self._refusals.refuse("queues", str(failure))
            raise failure from error
        if not least_pages:
            self._refusals.allow("queues")
            self._written = progress

    def flush_queues(self, least_pages: int = 0, *, thorough: bool = False) -> None:
        """Sync queues, and full index files; a thorough flush takes every queue and writes the checkpoint.

        Raises FlushFailed as `flush_commit_log` does.
        """
        written = self._written  # what is dispatched meanwhile waits in memory and is not part of this flush
        try:
            self._queues.flush(0 if thorough else least_pages)
            if self._index is not None:
                self._index.flush()
        except OSError as error:
            # As with the log: a later sync may say yes to pages that were dropped, so the checkpoint must stay.
            failure = FlushFailed(f"cannot sync consume queues or index: {error.strerror or error}")
            self._refusals.refuse("flush", str(failure))
            raise failure from error
        refused = self._refusals.get("flush")
        if refused is not None:
            raise FlushFailed(refused)
        if thorough:
            self.queues_safe_up_to = written.offset
            checkpoint = self._checkpoint
            checkpoint.logics_msg_timestamp = max(checkpoint.logics_msg_timestamp, written.timestamp)
            if self._index is not None:
                checkpoint.index_msg_timestamp = self._index.safe_timestamp
            try:
                checkpoint.write()
            except OSError as error:  # it may say less than is true: the next one puts that right
                raise storage_error("cannot write the checkpoint", error) from error

    def flush_everything(self) -> None:
        """For the store's own thread, when nothing is appended meanwhile."""
        self.commit()
        self._follower.dispatch_pending()
        self.flush_commit_log()
        self.flush_all_queues()

    def flush_all_queues(self) -> None:
        """Write and sync every queue. For the store's own thread."""
        self.write_pending()
        self.flush_queues(thorough=True)
