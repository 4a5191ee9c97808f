"""The results of a read of a queue and of a query by key."""

from __future__ import annotations

from enum import Enum

import msgspec

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.store.queue.backlog import Records, are_better_copied, pieces_of


class GetMessageStatus(Enum):
    """How a read ended, in RocketMQ's words."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class ReadResult(msgspec.Struct, frozen=True, gc=False):
    """Records of one queue as they lie on disk, and where to go on.

    `records` keeps the files that it has views of readable, even after they were deleted.
    """

    status: GetMessageStatus
    next_begin_offset: QueueOffset
    min_offset: QueueOffset
    max_offset: QueueOffset
    records: Records = []
    message_count: int = 0
    byte_count: int = 0
    suggest_pulling_from_slave: bool = False

    @property
    def slices(self) -> list[memoryview]:
        """The records, one behind the other: views of the log, or of a copy where they are small and lie apart."""
        if not self.byte_count:
            return []
        pieces = pieces_of(self.records, self.byte_count)
        return [memoryview(b"".join(pieces))] if are_better_copied(pieces, self.byte_count) else pieces


class QueryResult(msgspec.Struct, frozen=True):
    """Records found by key, oldest first, and the last offset and time in the index."""

    slices: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_physical_offset: PhysicalOffset
