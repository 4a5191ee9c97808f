"""Replaying the log in bulk: usual records of a walk become one batch of messages, which is applied as a whole."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from downrange.compiled import accelerated
from downrange.model.message import PhysicalOffset
from downrange.store.new_messages import NewMessages
from downrange.store.queue.queues import ConsumeQueues

if TYPE_CHECKING:
    from downrange.store.dispatcher import Dispatcher


@accelerated
def read_records(
    messages: NewMessages,
    memory: mmap.mmap,
    at: int,
    limit: int,
    start: PhysicalOffset,
    check_crc: bool,
    queues: ConsumeQueues,
    finds_queues: bool,
) -> int:
    """Add the messages of usual records to an empty batch, from position `at` of a file on, none beyond `limit`.

    Return the position of the first record that was not read. Usual is a whole and sound record of a queue that is
    known and not special; without `finds_queues` any queue will do. `start` is the offset of the file in the log. This
    function, in Python, reads none: `Walk` reads them one by one.
    """
    return at


@dataclass(eq=False)
class BulkReplay:
    """Replays usual records many at a time; a walk asks it at every record. For the store's own thread.

    `applied` is called with each batch. `begin` and `end` are the offsets between which it may take records. With
    `only_index` queues are left alone, as by `Dispatcher.index_only`.
    """

    dispatcher: Dispatcher
    applied: Callable[[NewMessages], None] = lambda messages: None
    only_index: bool = False
    begin: PhysicalOffset = PhysicalOffset(0)
    end: PhysicalOffset = PhysicalOffset(1 << 62)
    records: int = field(init=False, default=0)
    """How many records were taken so far."""
    last_offset: PhysicalOffset = field(init=False, default=PhysicalOffset(0))
    last_timestamp: int = field(init=False, default=0)
    """Physical offset and store time of the last of them."""

    def take(self, mapping: mmap.mmap, at: int, limit: int, start: PhysicalOffset, check_crc: bool) -> int:
        """Replay records from position `at` of a file on, none of which ends behind `limit`; where the next one begins.

        Raises OSError and StoreError when a queue cannot be written.
        """
        limit = min(limit, self.end - start)
        dispatcher = self.dispatcher
        while self.begin <= start + at < start + limit:
            messages = NewMessages()
            read_records(messages, mapping, at, limit, start, check_crc, dispatcher.queues, not self.only_index)
            read = len(messages)
            if not read:
                break
            if not self.only_index:
                dispatcher.apply_usual(messages)
            elif dispatcher.index is not None:
                dispatcher.index.put(messages, 0, read)
            count = len(messages)
            if not count:
                break
            if not self.only_index:
                self.applied(messages)
            self.records += count
            self.last_offset = messages.bounds(count - 1, count)[0]
            self.last_timestamp = messages.timestamp(count - 1)
            at = messages.end_offset - start
            if count < read:
                break
        return at
