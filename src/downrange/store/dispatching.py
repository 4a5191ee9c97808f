"""How far queues and index have followed the log, and letting them follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from downrange.model.message import PhysicalOffset
from downrange.store.bulk_replay import BulkReplay
from downrange.store.dispatcher import Dispatcher
from downrange.store.errors import StoreError
from downrange.store.growth import Growth
from downrange.store.log.commit_log import CommitLog
from downrange.store.log.walk import Walk
from downrange.store.refusals import Refusals

log = logging.getLogger(__name__)


class Dispatching:
    """Applies the log to what is derived from it, in order and without gaps.

    Holds always: every record before `offset` is in its queue and in the index. Who appends a record right there may
    apply it and move `offset` behind it; in all other cases `dispatch_pending` does. For the store's own thread.
    """

    def __init__(
        self, commit_log: CommitLog, dispatcher: Dispatcher, refusals: Refusals, *, at_once: bool, is_slave: bool
    ) -> None:
        self.offset = 0
        self.at_once = at_once
        """Can records be applied when they were appended? Those in the transient pool only after a commit."""
        self.dispatcher = dispatcher
        self._commit_log = commit_log
        self._refusals = refusals
        self._is_slave = is_slave

    def __repr__(self) -> str:
        return f"<Dispatching offset={self.offset} behind={self.behind_bytes}>"

    @property
    def behind_bytes(self) -> int:
        # A slave may know that the rest of a file is blank before it has got it.
        return max(0, self._commit_log.max_offset - self.offset)

    def dispatch_pending(self, watched: Mapping[tuple[str, int], object] | None = None) -> Growth:
        """Apply what lies in the log beyond the last applied record; return what was new, for those who wait for it.

        `watched` has the topics and ids of their queues; None is all queues.
        """
        growth = Growth(watched)
        commit_log = self._commit_log
        while self.offset < commit_log.max_offset:
            bulk = BulkReplay(self.dispatcher, growth)
            walk = commit_log.walk(PhysicalOffset(max(self.offset, commit_log.min_offset)), bulk=bulk)
            try:
                for record in walk:
                    self.offset = record.physical_offset  # until this one is applied, too
                    state = self.dispatcher.replay(record)
                    if state is not None:
                        growth.add(state, record)
            except (OSError, StoreError) as error:
                self.failed(error)
                return growth
            self.offset = walk.end
            if walk.records:
                commit_log.last_store_timestamp = walk.last_timestamp
            if self._is_slave:
                if walk.end < commit_log.max_offset and not walk.is_cut_short:
                    self._refuse_to_follow(walk)
                    return growth
                break  # the rest of this record is still under way
            if walk.damage is None:
                break
            log.error("cannot dispatch: %s; the rest of this file is skipped", walk.damage)
            self.offset = min(commit_log.next_file_offset(self.offset), commit_log.max_offset)
        self._refusals.allow("dispatch")
        return growth

    def failed(self, error: Exception) -> None:
        """The log has the record, its queue does not: refuse more until `dispatch_pending` got through."""
        log.error("dispatch failed offset=%d: %s", self.offset, error)
        self._refusals.refuse("dispatch", f"a consume queue or the index cannot be written: {error}")

    def _refuse_to_follow(self, walk: Walk) -> None:
        """What the master sent cannot be read: its log is not the continuation of this one."""
        found = walk.damage or f"no record at {walk.end}: zeros"
        text = f"the log from the master does not fit this one: {found}; give this slave an empty directory"
        if self._refusals.get("master's log") != text:
            log.error("cannot follow: %s", text)
        self._refusals.refuse("master's log", text)
