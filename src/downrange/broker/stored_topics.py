"""The topics of stored messages, for requests that name a message by its place in the log."""

from __future__ import annotations

from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.model.record import CorruptRecord, decode_record
from downrange.model.topics import HALF_TOPIC, SCHEDULE_TOPIC
from downrange.store.message_store import MessageStore


class MessageTopics:
    """Reads the topic of one record: None where no record begins, and an empty name where something else lies.

    Body checksum and offset must be right: bytes in the body of a message must not pass for a record of their own.
    """

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def topic_at(self, physical_offset: int) -> str | None:
        """The topic of a record; a delayed or half message has the topic that it will go to."""
        message = self._read(physical_offset)
        if message is None or isinstance(message, str):
            return message
        real = message.properties.get(names.REAL_TOPIC) if message.topic in (HALF_TOPIC, SCHEDULE_TOPIC) else None
        return real or message.topic

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        message = self._read(physical_offset)
        if message is None or isinstance(message, str) or message.topic != HALF_TOPIC:
            return None  # the end of a transaction that names it is refused later
        return message.properties.get(names.REAL_TOPIC, "")

    def _read(self, physical_offset: int) -> StoredMessage | str | None:
        record = self._store.record_at(physical_offset)
        try:
            message = None if record is None else decode_record(record, check_crc=True)
        except CorruptRecord:
            return ""
        return "" if message is not None and message.physical_offset != physical_offset else message
