"""A message of the log that is to be stored once more: committed, delivered after its delay, or tried again."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from downrange.model.properties import MAX_PROPERTIES_BYTES, decode_properties, find_property
from downrange.model.record import MAGIC_V1, MAGIC_V2, CorruptRecord
from downrange.store.new_message import NewMessage
from downrange.store.record_head import HEAD_BY_FLAGS, HEAD_V4, V6_FLAGS

_UNPACK_V4: Final = HEAD_V4.unpack_from


class KeptMessage(msgspec.Struct, gc=False):
    """One record, in the form in which a message is appended: its hosts stay packed, its properties stay text.

    `message` is a copy of its own, the reader's to change; `text` is that of its properties.
    """

    message: NewMessage
    text: str
    queue_offset: int
    physical_offset: int
    store_timestamp: int

    def find(self, name: str) -> str | None:
        """The value of one property."""
        return find_property(self.text, name)

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.text)


def read_kept(record: memoryview) -> KeptMessage:
    """What a whole record holds. Raises CorruptRecord as `decode_record` does, in a third of its time."""
    try:
        return _read(record)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"record cannot be read: {error}") from None


def _read(record: memoryview) -> KeptMessage:
    fields = _UNPACK_V4(record)
    sys_flag = fields[7]
    body_at = 88
    if sys_flag & V6_FLAGS:
        layout = HEAD_BY_FLAGS[sys_flag & V6_FLAGS]
        fields = layout.unpack_from(record)
        body_at = layout.size
    (size, magic, _, queue_id, flag, queue_offset, physical_offset, _, born_timestamp, born_host, store_timestamp,
     store_host, reconsume_times, prepared_offset, body_length) = fields  # fmt: skip
    topic_at = body_at + body_length + 1
    if body_length < 0 or (magic != MAGIC_V1 and magic != MAGIC_V2):
        raise CorruptRecord(f"a record with the magic number {magic:#010x} and a body of {body_length} bytes")
    topic_length = record[topic_at - 1]
    is_too_long = topic_length > 127  # lengths are signed
    if magic == MAGIC_V2:
        topic_length = topic_length << 8 | record[topic_at]
        topic_at += 1
    properties_at = topic_at + topic_length + 2
    rest = record[properties_at - 2] << 8 | record[properties_at - 1]
    if is_too_long or rest > MAX_PROPERTIES_BYTES or not properties_at + rest == size == len(record):
        raise CorruptRecord(f"the parts of a record do not add up to its {size} bytes")
    properties = bytes(record[properties_at:])
    message = NewMessage(
        str(record[topic_at : properties_at - 2], "utf-8"),
        queue_id,
        bytes(record[body_at : body_at + body_length]),
        properties,
        born_timestamp,
        born_host,
        store_host,
        flag,
        sys_flag,
        reconsume_times,
        prepared_offset,
    )
    return KeptMessage(message, properties.decode(), queue_offset, physical_offset, store_timestamp)
