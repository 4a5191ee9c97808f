"""Replaying the log in bulk: the compiled step takes all usual records of a walk and leaves the others to Python."""

from __future__ import annotations

import mmap
from typing import Final

from downrange.compiled import steps
from downrange.model.message import PhysicalOffset
from downrange.store.dispatcher import Dispatcher
from downrange.store.growth import GrownQueue, Growth
from downrange.store.queue.queue_tails import ROW

_NOBODY: Final[dict[tuple[str, int], object]] = {}
# Blocks for entries that are ready before each call: enough for a queue to become full, or for many to get a new one.
_BLOCKS: Final = 1024


class BulkReplay:
    """Does for runs of usual records what `Walk` and `Dispatcher.replay` do for one; a walk asks it at every record.

    Usual is a whole and sound record of a queue that is known and not special, which comes next in it or is in it
    already, and whose keys have room in the index. With `only_index` queues are left alone, as by
    `Dispatcher.index_only`. For the store's own thread.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        growth: Growth | None = None,
        *,
        only_index: bool = False,
        begin: int = 0,
        end: int = 1 << 62,
    ) -> None:
        self._dispatcher = dispatcher
        self._growth = growth
        self._only_index = only_index
        # The offsets between which it may take records.
        self._begin = begin
        self._end = end
        self.records = 0
        """How many were taken so far."""
        self.last_offset = PhysicalOffset(0)
        self.last_timestamp = 0
        """Physical offset and store time of the last of them."""

    def take(self, mapping: mmap.mmap, at: int, limit: int, start: int, check_crc: bool) -> int:
        """Replay records from position `at` of a file on, none of which ends behind `limit`; where the next one begins.

        Raises OSError and StoreError when a queue cannot be written.
        """
        limit = min(limit, self._end - start)
        dispatcher, growth = self._dispatcher, self._growth
        queues, index = dispatcher.queues, dispatcher.index
        rows_by_topic = queues.rows_by_topic
        if steps is None or rows_by_topic is None or start + at < self._begin:
            return at
        by_raw_topic = None if self._only_index else queues.by_raw_topic
        sizes = None if growth is None else growth.sizes
        watched = _NOBODY if growth is None else growth.watched
        tails = queues.tails
        while at < limit:
            tails.make_room(_BLOCKS)
            replayed = steps.replay_records(
                mapping, at, limit, start, check_crc, by_raw_topic, rows_by_topic, queues.by_row, sizes, watched,
                tails.rows, tails.memory, None if index is None else index.place, dispatcher.indexed_up_to,
            )  # fmt: skip
            if replayed is None:
                break
            at, records, self.last_offset, self.last_timestamp, full, grown, *place = replayed
            self.records += records
            if index is not None:
                index.move_to(*place)
            if growth is not None and grown:
                growth.watched_messages += map(GrownQueue._make, grown)
            if not self._only_index:
                dispatcher.last_store_timestamp = self.last_timestamp
            if full is not None:
                state = queues.by_row[full // ROW]
                assert state is not None
                state.queue.spill()
        return at
