"""The layout of a stored record, its reader and its encoder. The same bytes lie on disk and travel in a pull reply.

All integers big-endian; positions for IPv4 hosts. Layout and worked example: docs/formats/record.md.

     0  total size 4   | 4  magic 4        | 8  body CRC 4    | 12 queue id 4   | 16 flag 4
    20  queue offset 8 | 28 physical off 8 | 36 sysFlag 4     | 40 born time 8  | 48 born host 8 or 20
    56  store time 8   | 64 store host 8 or 20                | 72 reconsume 4  | 76 prepared offset 8
    84  body length 4, body | topic length 1 (V2: 2), topic   | properties length 2, properties

A record is readable when its magic number is right, its lengths add up to its size, and the lengths of topic and
properties are not negative as signed numbers; any other bytes are a `CorruptRecord`. In C: `_compiled/records.h`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol

from downrange.model.errors import StoreError
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import unpack_host

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB  # written by 5.x for topics longer than 127 bytes: the topic length takes 2 bytes
MAGIC_BLANK: Final = 0xCBD43194  # fills the rest of a commit-log file

FIXED_SIZE: Final = 91  # a V1 record with IPv4 hosts and nothing in it
IPV6_EXTRA: Final = 12  # each IPv6 host is that much longer
CRC_MASK: Final = 0x7FFFFFFF  # RocketMQ's checksums are never negative
V6_FLAGS: Final = int(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)

QUEUE_OFFSET_AT: Final = 20
PHYSICAL_OFFSET_AT: Final = 28
SYS_FLAG_AT: Final = 36
STORE_TIMESTAMP_AT: Final = 56  # with an IPv4 born host
STORE_TIMESTAMP_END: Final = STORE_TIMESTAMP_AT + IPV6_EXTRA + 8  # with any born host

SIZE_AND_MAGIC: Final = struct.Struct(">iI")
# All that precedes the body: total size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag,
# born timestamp, born host, store timestamp, store host, reconsume times, prepared transaction offset, body length.
HEAD_V4: Final = struct.Struct(">iIIiiqqiq8sq8siqi")
# Lengths of (born host, store host) -> layout, and the host bits of sysFlag.
HEADS: Final = {
    (8, 8): (HEAD_V4, 0),
    (20, 8): (struct.Struct(">iIIiiqqiq20sq8siqi"), int(SysFlag.BORN_HOST_V6)),
    (8, 20): (struct.Struct(">iIIiiqqiq8sq20siqi"), int(SysFlag.STORE_HOST_V6)),
    (20, 20): (struct.Struct(">iIIiiqqiq20sq20siqi"), V6_FLAGS),
}
HEAD_BY_FLAGS: Final = {flags: layout for layout, flags in HEADS.values()}
assert HEAD_V4.size == FIXED_SIZE - 3

_unpack_v4: Final = HEAD_V4.unpack_from

Head = tuple[
    int, int, int, int, int, QueueOffset, PhysicalOffset, int, int, bytes, int, bytes, int, int, int
]  # fmt: skip
"""The fields of HEAD_V4, in their order."""


if TYPE_CHECKING:

    class Bytes(Buffer, Protocol):
        """Bytes, a view of them, or a mapped file."""

        def __len__(self) -> int: ...
        def __getitem__(self, at: int, /) -> int: ...


class CorruptRecord(StoreError):
    """These bytes are not a whole, valid record."""


def crc32(body: Buffer) -> int:
    """RocketMQ's body checksum: CRC-32 with the top bit cleared."""
    return zlib.crc32(body) & CRC_MASK


def encode_record(message: StoredMessage, packed_born_host: bytes, packed_store_host: bytes) -> bytes:
    """The record of `message`; size, checksum and host flags are computed here, not taken from it."""
    head, host_flags = HEADS[len(packed_born_host), len(packed_store_host)]
    topic, properties = message.topic.encode(), message.properties_text.encode()
    size = head.size + len(message.body) + 1 + len(topic) + 2 + len(properties)
    return b"".join(
        (
            head.pack(
                size, MAGIC_V1, crc32(message.body), message.queue_id, message.flag, message.queue_offset,
                message.physical_offset, message.sys_flag & ~V6_FLAGS | host_flags, message.born_timestamp,
                packed_born_host, message.store_timestamp, packed_store_host, message.reconsume_times,
                message.prepared_transaction_offset, len(message.body),
            ),
            message.body,
            len(topic).to_bytes(1, "big"),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )  # fmt: skip


def unpack_record(data: Bytes, at: int, limit: int, start: int = 0) -> tuple[Head, int, int, int, int]:
    """The head of the record at `at`, then where its body, its topic, its properties begin, and where it ends.

    The body ends where the length of the topic begins, the topic two bytes before the properties. Raises CorruptRecord,
    also for a record that ends behind `limit`; the error says where the record is, and `start` is the offset of the
    first byte of `data`.
    """
    try:
        head: Head = _unpack_v4(data, at)
        if head[1] == MAGIC_V1 and not head[7] & V6_FLAGS:
            body_at = at + 88
            topic_at = body_at + head[14] + 1
            topic_length = data[topic_at - 1]
        else:
            head, body_at, topic_at, topic_length = _unpack_unusual(data, at, head, start)
        properties_at = topic_at + topic_length + 2
        high = data[properties_at - 2]
        end = at + head[0]
        if (
            properties_at + (high << 8 | data[properties_at - 1]) == end <= limit
            and high < 128
            and head[14] >= 0
            and (topic_length < 128 or (head[1] == MAGIC_V2 and topic_length < 32768))
        ):
            return head, body_at, topic_at, properties_at, end
    except struct.error:
        raise CorruptRecord(f"record at {start + at} is cut off") from None
    except IndexError:  # a length leads out of the buffer
        pass
    size, body_length = head[0], head[14]
    if not FIXED_SIZE <= size <= limit - at:
        raise CorruptRecord(f"record at {start + at} says {size} bytes, {limit - at} are there")
    if not 0 <= body_length <= size - FIXED_SIZE:
        raise CorruptRecord(f"record at {start + at} has a body of {body_length} bytes in {size}")
    raise CorruptRecord(f"record at {start + at}: its parts do not add up to {size} bytes")


def _unpack_unusual(data: Bytes, at: int, head: Head, start: int) -> tuple[Head, int, int, int]:
    """Head, places of body and topic, and length of the topic, for both magic numbers and any hosts."""
    if head[1] != MAGIC_V1 and head[1] != MAGIC_V2:
        raise CorruptRecord(f"no record at {start + at}: magic number {head[1]:#010x}")
    layout = HEAD_BY_FLAGS[head[7] & V6_FLAGS]
    head = layout.unpack_from(data, at)
    body_at = at + layout.size
    topic_at = body_at + head[14] + 1
    topic_length = data[topic_at - 1]
    if head[1] == MAGIC_V2:
        topic_length = topic_length << 8 | data[topic_at]
        topic_at += 1
    return head, body_at, topic_at, topic_length


def record_size(data: Bytes, at: int = 0) -> int | None:
    """The size of the record that begins with the eight bytes at `at`; None when no record begins there."""
    size, magic = SIZE_AND_MAGIC.unpack_from(data, at) if len(data) - at >= SIZE_AND_MAGIC.size else (0, 0)
    return int(size) if magic in (MAGIC_V1, MAGIC_V2) and size >= FIXED_SIZE else None


def store_timestamp_of(head: bytes | memoryview) -> int:
    """The store time of the record that begins with these STORE_TIMESTAMP_END bytes."""
    sys_flag = int.from_bytes(head[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big")
    at = STORE_TIMESTAMP_AT + (IPV6_EXTRA if sys_flag & SysFlag.BORN_HOST_V6 else 0)
    return int.from_bytes(head[at : at + 8], "big", signed=True)


def decode_record(buffer: bytes | bytearray | memoryview, start: int = 0, *, check_crc: bool = False) -> StoredMessage:
    """The record that begins at `start`."""
    view = memoryview(buffer)
    head, body_at, topic_at, properties_at, end = unpack_record(view, start, len(view))
    (size, _, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born_host,
     store_timestamp, store_host, reconsume_times, prepared_transaction_offset, body_length) = head  # fmt: skip
    body = bytes(view[body_at : body_at + body_length])
    if check_crc and crc32(body) != body_crc:
        raise CorruptRecord(f"record at {start}: body checksum {crc32(body)} is not {body_crc}")
    try:
        topic = str(view[topic_at : properties_at - 2], "utf-8")
        properties = str(view[properties_at:end], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"record at {start} cannot be read: {error}") from None
    return StoredMessage(
        topic=topic,
        queue_id=queue_id,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        body=body,
        properties_text=properties,
        sys_flag=sys_flag,
        flag=flag,
        born_timestamp=born_timestamp,
        born_host=unpack_host(born_host),
        store_timestamp=store_timestamp,
        store_host=unpack_host(store_host),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
        body_crc=body_crc,
        store_size=size,
    )


def properties_of(record: memoryview | bytes) -> str:
    """The text of a record's properties, without reading the rest; empty when these bytes are no record."""
    # This runs for every message a consumer filters by its properties.
    try:
        _, _, _, properties_at, end = unpack_record(record, 0, len(record))
    except CorruptRecord:
        return ""
    return str(record[properties_at:end], "utf-8", "replace")


def decode_records(buffer: bytes | bytearray | memoryview) -> Iterator[StoredMessage]:
    """Every record of a pull reply, in order."""
    at = 0
    while at < len(buffer):
        message = decode_record(buffer, at)
        yield message
        at += message.store_size
