"""What a read of a queue or a query by key returns."""

from __future__ import annotations

from enum import Enum

import msgspec


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


class ReadResult(msgspec.Struct, frozen=True):
    """Records of one queue as they lie on disk, and where to go on.

    `slices` are views of the log, several records in one where they lie next to each other, or of a copy. Holding one
    keeps its file readable, even after it was deleted.
    """

    status: GetMessageStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    slices: list[memoryview] = []
    message_count: int = 0
    byte_count: int = 0
    suggest_pulling_from_slave: bool = False


class QueryResult(msgspec.Struct, frozen=True):
    """Records found by key, oldest first, and how far the index reaches."""

    slices: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_physical_offset: int
