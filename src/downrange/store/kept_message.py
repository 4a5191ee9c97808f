"""A message of the log that is to be stored once more: committed, delivered after its delay, or tried again."""

from __future__ import annotations

import msgspec

from downrange.model.message import PhysicalOffset, QueueOffset
from downrange.model.properties import decode_properties, find_property
from downrange.model.record import CorruptRecord, unpack_record
from downrange.store.new_message import NewMessage


class KeptMessage(msgspec.Struct, gc=False):
    """One record, in the form in which a message is appended: its hosts stay packed, its properties stay text.

    `message` is a copy, which the reader may change; `text` is the text form of its properties.
    """

    message: NewMessage
    text: str
    queue_offset: QueueOffset
    physical_offset: PhysicalOffset
    store_timestamp: int

    def find(self, name: str) -> str | None:
        """The value of one property."""
        return find_property(self.text, name)

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.text)


def read_kept(record: memoryview) -> KeptMessage:
    """The message of a whole record. Raises CorruptRecord as `decode_record` does, in a third of its time."""
    raw = bytes(record)  # pieces of bytes are made quicker than those of a view
    head, body_at, topic_at, properties_at, end = unpack_record(raw, 0, len(raw))
    (size, _, _, queue_id, flag, queue_offset, physical_offset, sys_flag, born_timestamp, born_host, store_timestamp,
     store_host, reconsume_times, prepared_offset, body_length) = head  # fmt: skip
    if end != len(raw):
        raise CorruptRecord(f"a record of {size} bytes in {len(raw)}")
    properties = raw[properties_at:]
    try:
        topic, text = raw[topic_at : properties_at - 2].decode(), properties.decode()
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"record cannot be read: {error}") from None
    message = NewMessage(
        topic,
        queue_id,
        raw[body_at : body_at + body_length],
        properties,
        born_timestamp,
        born_host,
        store_host,
        flag,
        sys_flag,
        reconsume_times,
        prepared_offset,
    )
    return KeptMessage(message, text, queue_offset, physical_offset, store_timestamp)
