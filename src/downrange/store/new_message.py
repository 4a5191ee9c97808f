"""What goes into the store, and what comes back from an append."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import msgspec


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


class BatchUnit(NamedTuple):
    """One message of a batch; topic, queue, hosts and further properties are those of the batch."""

    flag: int
    body: bytes
    properties: bytes

    def message_of(self, batch: NewMessage) -> NewMessage:
        """The message as it would be if it had come alone."""
        return NewMessage(
            batch.topic, batch.queue_id, self.body, join_properties(self.properties, batch.properties),
            batch.born_timestamp, batch.born_host, batch.store_host, self.flag, batch.sys_flag, batch.reconsume_times,
            batch.prepared_transaction_offset,
        )  # fmt: skip


def join_properties(own: bytes, shared: bytes) -> bytes:
    """Properties of a batch's unit, then those of the whole batch."""
    if own and shared and not own.endswith(b"\x02"):
        return own + b"\x02" + shared
    return own + shared


class PutMessageStatus(Enum):
    """How an append ended, in RocketMQ's words. The flush and slave ones are found out by who waits for them."""

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


class AppendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message went. For a batch: the first message, all sizes together, and every physical offset."""

    status: PutMessageStatus
    physical_offset: int = 0
    size: int = 0
    queue_offset: int = 0
    store_timestamp: int = 0
    physical_offsets: tuple[int, ...] = ()
    reason: str = ""

    @property
    def end_offset(self) -> int:
        """The log is safe for this message once it is flushed or replicated up to here."""
        return self.physical_offset + self.size
