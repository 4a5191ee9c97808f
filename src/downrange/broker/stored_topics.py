"""Records that requests name by their place in the log, and the topics of these records."""

from __future__ import annotations

from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.model.record import CorruptRecord, decode_record
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from downrange.store.message_store import MessageStore

# Topics whose messages wait here for the topic in their property REAL_TOPIC.
_WAITING_ROOMS = frozenset({HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, CHECK_MAX_TIME_TOPIC})


def named_record(store: MessageStore, physical_offset: int) -> tuple[memoryview, StoredMessage] | None:
    """The bytes and the message of the record that begins at an offset a client named; None when none does.

    The checksum of the body and the offset in the record must be right: the body of a message may look like a record
    that goes on into the messages of others.
    """
    record = store.record_at(physical_offset)
    if record is None:
        return None
    try:
        message = decode_record(record, check_crc=True)
    except CorruptRecord:
        return None
    return (record, message) if message.physical_offset == physical_offset else None


class MessageTopics:
    """Tells the topic of one record; None where no record begins, and nothing can be read or changed."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def topic_at(self, physical_offset: int) -> str | None:
        """The topic of a record; a message that waits for its time or its transaction has the topic it will go to."""
        found = named_record(self._store, physical_offset)
        if found is None:
            return None
        message = found[1]
        real = message.properties.get(names.REAL_TOPIC) if message.topic in _WAITING_ROOMS else None
        return real or message.topic

    def topic_of_half_message(self, physical_offset: int) -> str | None:
        found = named_record(self._store, physical_offset)
        if found is None or found[1].topic != HALF_TOPIC:
            return None  # the end of a transaction that names it is refused later
        return found[1].properties.get(names.REAL_TOPIC, "")
