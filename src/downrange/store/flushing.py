"""Writes log, queues and index to the disk, and the checkpoint that records how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from downrange.model.message import PhysicalOffset
from downrange.store.checkpoint import Checkpoint
from downrange.store.dispatcher import LogFollower
from downrange.store.errors import FlushFailed
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.segments import storage_error
from downrange.store.refusals import Refusals


class _Progress(NamedTuple):
    """The last queue entry that was written: its store time, and the end of its record in the log."""

    timestamp: int
    offset: PhysicalOffset


class Flushing:
    """Syncs appended messages, and knows how far this has come.

    Holds always: the checkpoint covers only what was synced before; after a failed sync no message is taken.
    `write_pending…` is for the store's own thread. Each other method may run in one worker thread at a time.
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
        self._written = _Progress(0, PhysicalOffset(0))
        self.is_recovering = True
        """Whether recovery fills the queues, also with records that were not confirmed when the last run ended."""
        self.notes_confirm_offset = False
        """Whether the checkpoint has a confirm offset: only under a controller, as with RocketMQ."""
        self.queues_safe_up_to = PhysicalOffset(0)
        """Messages before this offset of the log have their queue entries on disk."""

    def __repr__(self) -> str:
        return f"<Flushing log={self._segments.flushed_offset} queues={self.queues_safe_up_to}>"

    def commit(self, least_pages: int = 0) -> bool:
        """Write the transient pool to the files; True if messages became readable (then call `dispatch_pending`)."""
        if not self._segments.is_pooled or self._segments.pages_to_commit < least_pages:
            return False
        before = self._commit_log.max_offset
        self._segments.commit()
        return self._commit_log.max_offset > before

    def log_needs_flush(self, least_pages: int) -> bool:
        """Whether `flush_commit_log` would sync anything. For any thread."""
        segments = self._segments
        return segments.max_offset > segments.flushed_offset and segments.dirty_pages >= least_pages

    def queues_need_flush(self, least_pages: int) -> bool:
        """Whether a `flush_queues` that is not thorough would sync anything. For the store's own thread."""
        return self._queues.need_flush(least_pages) or (self._index is not None and self._index.needs_flush)

    def flush_commit_log(self, least_pages: int = 0) -> PhysicalOffset:
        """Sync the log if at least `least_pages` pages are dirty; return the offset up to which it is on disk.

        Raises FlushFailed if the sync fails, and at every later call; the store then takes no more messages.
        """
        if least_pages and self._segments.dirty_pages < least_pages:
            return self._segments.flushed_offset
        timestamp = self._commit_log.last_store_timestamp
        try:
            flushed = self._segments.flush()
        except FlushFailed as error:
            self._refusals.refuse("flush", str(error))
            raise
        if not self._segments.is_pooled or self._commit_log.max_offset == self._commit_log.wrote_offset:
            self._checkpoint.physic_msg_timestamp = max(self._checkpoint.physic_msg_timestamp, timestamp)
        return flushed

    def write_pending(self) -> None:
        """Write queue entries that wait in memory. For the store's own thread, before `flush_queues`.

        Raises a StoreError such as DiskFull if this fails; nothing is lost, and the store takes no messages until a
        later call succeeds.
        """
        for _ in self.write_pending_in_slices():
            pass

    def write_pending_in_slices(self, slice_size: int = 64, least_pages: int = 0) -> Iterator[None]:
        """As `write_pending`, but with pauses: thousands of queues take longer than a sender may wait.

        With `least_pages`, and many queues, queues with less to write are left for later: a write takes as long for one
        entry as for hundreds. A thorough flush needs all queues.
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
        """Sync queues and full index files; a thorough flush syncs every queue and writes the checkpoint.

        Raises FlushFailed as `flush_commit_log` does.
        """
        written = self._written  # entries made during the flush wait in memory and are not part of it
        try:
            self._queues.flush(0 if thorough else least_pages)
            if self._index is not None:
                self._index.flush()
        except OSError as error:
            # As with the log: a later sync may succeed although pages were dropped, so the checkpoint must not move.
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
            if self.notes_confirm_offset and not self.is_recovering:
                checkpoint.confirm_phy_offset = written.offset
            try:
                checkpoint.write()
            except OSError as error:  # an old checkpoint is harmless: the next one will be right
                raise storage_error("cannot write the checkpoint", error) from error

    def flush_everything(self) -> None:
        """Sync everything. For the store's own thread, while nothing is appended."""
        self.commit()
        self._follower.dispatch_pending()
        self.flush_commit_log()
        self.flush_all_queues()

    def flush_all_queues(self) -> None:
        """Write and sync every queue. For the store's own thread."""
        self.write_pending()
        self.flush_queues(thorough=True)
