"""A message before it is stored, a message as it was stored, and the queue it lies in."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntFlag
from typing import NamedTuple, NewType

from downrange.model import properties as names
from downrange.model.message_id import HostPort, offset_message_id, pack_host

PhysicalOffset = NewType("PhysicalOffset", int)
"""Byte position in the commit log."""
QueueOffset = NewType("QueueOffset", int)
"""Message number within one queue."""


class TopicQueue(NamedTuple):
    """One queue on one broker."""

    topic: str
    queue_id: int


class MessageQueue(NamedTuple):
    """One queue of a topic, anywhere in the cluster. All clients of a group must sort queues in this order."""

    topic: str
    broker_name: str
    queue_id: int


class SysFlag(IntFlag):
    """Bits of a record's sysFlag."""

    COMPRESSED = 1
    MULTI_TAGS = 2
    TRANSACTION_PREPARED = 4
    TRANSACTION_COMMIT = 8
    TRANSACTION_ROLLBACK = 12
    BORN_HOST_V6 = 16
    STORE_HOST_V6 = 32
    NEED_UNWRAP = 64
    INNER_BATCH = 128
    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300


TRANSACTION_MASK = 12
COMPRESSION_TYPE_MASK = 0x700


@dataclass(slots=True)
class Message:
    """A message as a producer gets it from the user: topic, body, keys, tags and other properties."""

    topic: str
    body: bytes
    tags: str | None = None
    keys: str | None = None
    flag: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    delay_level: int = 0
    """1 to 18: delivered after 1 s … 2 h; 0: at once."""
    sharding_key: str | None = None
    """Messages with the same key go to the same queue and are consumed in the order sent."""
    wait_store_msg_ok: bool = True
    """Whether the broker answers only after flush and replication, where its settings promise them."""
    deliver_at: datetime | int | None = None
    """When consumers get the message: a time, or milliseconds since 1970. None, or a time that is over: at once."""
    deliver_after: timedelta | float | None = None
    """How long after the broker got it consumers get the message: a time span, or seconds. None: at once."""

    @property
    def is_delayed(self) -> bool:
        """Whether consumers get the message later than it is sent."""
        return bool(self.delay_level) or self.deliver_at is not None or self.deliver_after is not None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One record of the commit log, as a broker sends it and as it lies on disk."""

    topic: str
    queue_id: int
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    body: bytes
    properties_text: str
    sys_flag: int
    flag: int
    born_timestamp: int
    born_host: HostPort
    store_timestamp: int
    store_host: HostPort
    reconsume_times: int
    prepared_transaction_offset: int
    body_crc: int
    store_size: int

    @property
    def properties(self) -> dict[str, str]:
        return names.decode_properties(self.properties_text)

    @property
    def tags(self) -> str | None:
        return names.find_property(self.properties_text, names.TAGS)

    @property
    def keys(self) -> list[str]:
        text = names.find_property(self.properties_text, names.KEYS)
        return [key for key in text.split(names.KEY_SEPARATOR) if key] if text else []

    @property
    def unique_key(self) -> str | None:
        return names.find_property(self.properties_text, names.UNIQ_KEY)

    @property
    def offset_message_id(self) -> str:
        return offset_message_id(pack_host(*self.store_host), self.physical_offset)

    @property
    def message_id(self) -> str:
        """The id that users call *the* message id: the unique id if the producer gave one, else the offset id."""
        return self.unique_key or self.offset_message_id
