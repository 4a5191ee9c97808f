"""One message on its way into the store, and what an append comes to."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec

from downrange.model.message import PhysicalOffset, QueueOffset


class NewMessage(msgspec.Struct, gc=False):
    """A message on its way into the log: everything a record holds except what the log itself decides.

    `properties` is the stored text in UTF-8. Hosts are packed: 4 or 16 address bytes and a 4-byte port; the host bits
    of `sys_flag` are set from their lengths.
    """

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


class PutMessageStatus(Enum):
    """How an append ended, in RocketMQ's words. Flush and slave statuses come from the parts that wait for those."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPEDFILE_FAILED = "CREATE_MAPEDFILE_FAILED"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    OS_PAGECACHE_BUSY = "OS_PAGECACHE_BUSY"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"

    @property
    def is_safe_here(self) -> bool:
        """Whether the message is as safe on this broker as it is to be, whatever its slaves have of it."""
        return self in _SAFE_HERE


_SAFE_HERE = frozenset(
    {PutMessageStatus.PUT_OK, PutMessageStatus.FLUSH_SLAVE_TIMEOUT, PutMessageStatus.SLAVE_NOT_AVAILABLE}
)


class Refusal(NamedTuple):
    """Why messages were not stored."""

    status: PutMessageStatus
    reason: str


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """Where one message went, or why it was not stored."""

    status: PutMessageStatus
    physical_offset: PhysicalOffset = PhysicalOffset(0)
    size: int = 0
    queue_offset: QueueOffset = QueueOffset(0)
    reason: str = ""

    @property
    def end_offset(self) -> int:
        """The message is safe once the log is flushed or replicated up to this offset."""
        return self.physical_offset + self.size
