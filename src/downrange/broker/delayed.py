"""Delayed messages: how a message is put into the delay topic, and how it gets out again.

A delayed message is stored in SCHEDULE_TOPIC_XXXX, queue = level - 1, and keeps its real topic and queue as
properties. When due it is written again to the real topic with the same property text: the DELAY in that text has done
its work and must not delay it a second time, so whoever stores a message says whether it is to be delayed.
"""

from __future__ import annotations

from downrange.model import properties as names
from downrange.model.message import StoredMessage
from downrange.model.message_id import pack_host
from downrange.model.properties import decode_properties, encode_properties
from downrange.model.topics import HALF_TOPIC, SCHEDULE_TOPIC
from downrange.store.new_message import NewMessage


def delay_level(properties_text: str) -> int:
    """The level a producer asked for; 0 when none, or when it is no number."""
    text = names.find_property(properties_text, names.DELAY)
    if text is None:
        return 0
    try:
        return max(0, int(text))
    except ValueError:
        return 0


def delayed(message: NewMessage, properties: dict[str, str], level: int, max_level: int) -> NewMessage:
    """`message` as it waits in the delay topic. Levels beyond the last count as the last."""
    level = min(level, max_level)
    waiting = {
        **properties,
        names.DELAY: str(level),
        names.REAL_TOPIC: message.topic,
        names.REAL_QID: str(message.queue_id),
    }
    return NewMessage(
        topic=SCHEDULE_TOPIC,
        queue_id=level - 1,
        body=message.body,
        properties=stored_text(waiting),
        born_timestamp=message.born_timestamp,
        born_host=message.born_host,
        store_host=message.store_host,
        flag=message.flag,
        sys_flag=message.sys_flag,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )


def delivered(stored: StoredMessage) -> NewMessage | None:
    """The message that a record of the delay topic stands for; None when it does not say where it belongs."""
    properties = decode_properties(stored.properties_text)
    topic, queue_id = properties.get(names.REAL_TOPIC), properties.get(names.REAL_QID, "")
    if topic is None or topic == HALF_TOPIC or not queue_id.isdigit():
        return None
    return NewMessage(
        topic=topic,
        queue_id=int(queue_id),
        body=stored.body,
        properties=stored.properties_text.encode(),
        born_timestamp=stored.born_timestamp,
        born_host=pack_host(*stored.born_host),
        store_host=pack_host(*stored.store_host),
        flag=stored.flag,
        sys_flag=stored.sys_flag,
        reconsume_times=stored.reconsume_times,
        prepared_transaction_offset=stored.prepared_transaction_offset,
    )


def stored_text(properties: dict[str, str]) -> bytes:
    """Property text as 4.9 stores it: no separator at the end."""
    return encode_properties(properties).removesuffix(names.PROPERTY_SEPARATOR).encode()
