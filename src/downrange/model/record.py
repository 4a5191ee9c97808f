"""One stored record: bytes <-> StoredMessage. The same bytes lie on disk and travel in a pull reply.

All integers big-endian; positions for IPv4 hosts. Layout and worked example: docs/formats/record.md.

     0  total size 4   | 4  magic 4        | 8  body CRC 4    | 12 queue id 4   | 16 flag 4
    20  queue offset 8 | 28 physical off 8 | 36 sysFlag 4     | 40 born time 8  | 48 born host 8 or 20
    56  store time 8   | 64 store host 8 or 20                | 72 reconsume 4  | 76 prepared offset 8
    84  body length 4, body | topic length 1 (V2: 2), topic   | properties length 2, properties

Only a record whose lengths add up to its size is decoded; everything else is `CorruptRecord`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

from downrange.model.errors import StoreError
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import unpack_host

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB  # written by 5.x for topics longer than 127 bytes: the topic length takes 2 bytes
_MAGIC_V2_END: Final = MAGIC_V2 & 0xFF
MAGIC_BLANK: Final = 0xCBD43194  # fills the rest of a commit-log file

FIXED_SIZE: Final = 91  # a V1 record with IPv4 hosts and nothing in it
IPV6_EXTRA: Final = 12  # each IPv6 host is that much longer

# total size … sysFlag, born timestamp: the part whose positions never move.
HEAD: Final = struct.Struct(">iIIiiqqiq")
assert HEAD.size == 48
# reconsume times, prepared transaction offset, body length: follows the store host.
AFTER_HOSTS: Final = struct.Struct(">iqi")

_BODY_LENGTH_AT: Final = 84  # with IPv4 hosts
_LENGTH: Final = struct.Struct(">I")
_V6_HOSTS: Final = int(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)

Buffer = bytes | bytearray | memoryview


class CorruptRecord(StoreError):
    """These bytes are not a whole, valid record."""


def crc32(body: Buffer) -> int:
    """RocketMQ's body checksum: CRC-32 with the top bit cleared."""
    return zlib.crc32(body) & 0x7FFFFFFF


def hosts_size(sys_flag: int) -> tuple[int, int]:
    if not sys_flag & _V6_HOSTS:  # nearly always, and an enum's & is slow
        return 8, 8
    return (20 if sys_flag & SysFlag.BORN_HOST_V6 else 8), (20 if sys_flag & SysFlag.STORE_HOST_V6 else 8)


def encode_record(message: StoredMessage, packed_born_host: bytes, packed_store_host: bytes) -> bytes:
    """The record of `message`; size, checksum and host flags are computed here, not taken from it."""
    topic = message.topic.encode()
    properties = message.properties_text.encode()
    sys_flag = message.sys_flag & ~(SysFlag.BORN_HOST_V6 | SysFlag.STORE_HOST_V6)
    if len(packed_born_host) == 20:
        sys_flag |= SysFlag.BORN_HOST_V6
    if len(packed_store_host) == 20:
        sys_flag |= SysFlag.STORE_HOST_V6
    size = (
        FIXED_SIZE
        - 16
        + len(packed_born_host)
        + len(packed_store_host)
        + len(message.body)
        + len(topic)
        + len(properties)
    )
    return b"".join(
        (
            HEAD.pack(
                size,
                MAGIC_V1,
                crc32(message.body),
                message.queue_id,
                message.flag,
                message.queue_offset,
                message.physical_offset,
                sys_flag,
                message.born_timestamp,
            ),
            packed_born_host,
            message.store_timestamp.to_bytes(8, "big"),
            packed_store_host,
            AFTER_HOSTS.pack(message.reconsume_times, message.prepared_transaction_offset, len(message.body)),
            message.body,
            len(topic).to_bytes(1, "big"),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )


def decode_record(buffer: Buffer, start: int = 0, *, check_crc: bool = False) -> StoredMessage:
    """The record that begins at `start`."""
    try:
        return _decode(memoryview(buffer), start, check_crc)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise CorruptRecord(f"record at byte {start} cannot be read: {error}") from None


def _decode(view: memoryview, start: int, check_crc: bool) -> StoredMessage:
    size, magic, body_crc, queue_id, flag, queue_offset, physical_offset, sys_flag, born = HEAD.unpack_from(view, start)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise CorruptRecord(f"record at byte {start} has the magic number {magic:#010x}")
    if size > len(view) - start:
        raise CorruptRecord(f"record at byte {start} says {size} bytes, {len(view) - start} are there")
    born_size, store_size = hosts_size(sys_flag)
    at = start + HEAD.size
    born_host = unpack_host(view[at : at + born_size])
    at += born_size
    store_timestamp = int.from_bytes(view[at : at + 8], "big", signed=True)
    at += 8
    store_host = unpack_host(view[at : at + store_size])
    at += store_size
    reconsume_times, prepared, body_length = AFTER_HOSTS.unpack_from(view, at)
    at += AFTER_HOSTS.size
    if body_length < 0 or at + body_length > start + size:
        raise CorruptRecord(f"record at byte {start} has a body of {body_length} bytes in {size}")
    body = bytes(view[at : at + body_length])
    at += body_length
    length_size = 2 if magic == MAGIC_V2 else 1
    topic_length = int.from_bytes(view[at : at + length_size], "big", signed=True)
    at += length_size
    topic = str(view[at : at + topic_length], "utf-8") if topic_length >= 0 else ""
    at += topic_length
    properties_length = int.from_bytes(view[at : at + 2], "big", signed=True)
    at += 2
    if topic_length < 0 or properties_length < 0 or at + properties_length != start + size:
        raise CorruptRecord(f"record at byte {start}: its parts do not add up to {size} bytes")
    if check_crc and crc32(body) != body_crc:
        raise CorruptRecord(f"record at byte {start}: body checksum {crc32(body)} is not {body_crc}")
    return StoredMessage(
        topic=topic,
        queue_id=queue_id,
        queue_offset=QueueOffset(queue_offset),
        physical_offset=PhysicalOffset(physical_offset),
        body=body,
        properties_text=str(view[at : at + properties_length], "utf-8"),
        sys_flag=sys_flag,
        flag=flag,
        born_timestamp=born,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared,
        body_crc=body_crc,
        store_size=size,
    )


def properties_of(record: memoryview | bytes) -> str:
    """The text of a record's properties, without reading the rest. Bytes that are no record have some text or none."""
    # This runs for every message a consumer filters by its properties.
    try:
        at = _BODY_LENGTH_AT
        flags = record[39]
        if flags & _V6_HOSTS:
            at += IPV6_EXTRA * (flags & _V6_HOSTS).bit_count()
        at += 4 + _LENGTH.unpack_from(record, at)[0]
        if record[7] == _MAGIC_V2_END:
            at += 2 + (record[at] << 8 | record[at + 1])
        else:
            at += 1 + record[at]
        length = record[at] << 8 | record[at + 1]
    except (IndexError, struct.error):
        return ""
    return str(record[at + 2 : at + 2 + length], "utf-8", "replace")


def decode_records(buffer: Buffer) -> Iterator[StoredMessage]:
    """Every record of a pull reply, in order."""
    at = 0
    while at < len(buffer):
        message = decode_record(buffer, at)
        yield message
        at += message.store_size
