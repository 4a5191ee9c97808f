"""The results of a read of a queue and of a query by key."""

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
    """Records of one queue as they are on disk, and the offset of the next read.

    `slices` are views of the log or of a copy, with several records in one where these follow each other. A slice keeps
    its file readable, even after the file was deleted.
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
    """Records found by key, oldest first, and the last offset and time in the index."""

    slices: list[memoryview]
    index_last_update_timestamp: int
    index_last_update_physical_offset: int
