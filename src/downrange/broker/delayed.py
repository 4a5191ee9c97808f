"""Delayed messages: how a message is put into the delay topic, and how it gets out again.

A delayed message is stored in SCHEDULE_TOPIC_XXXX, queue = level - 1, and keeps its real topic and queue as
properties. When due it is written again to the real topic with the same property text: the DELAY in that text has done
its work and must not delay it a second time, so whoever stores a message says whether it is to be delayed.
"""

from __future__ import annotations

from collections.abc import Mapping

from downrange.model import properties as names
from downrange.model.topics import HALF_TOPIC, SCHEDULE_TOPIC
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import NewMessage


def delay_level(delay: str | None) -> int:
    """The level a producer asked for in the property DELAY; 0 when there is none, or when it is no number."""
    if delay is None:
        return 0
    try:
        return max(0, int(delay))
    except ValueError:
        return 0


def delayed(message: NewMessage, properties: dict[str, str], level: int, max_level: int) -> NewMessage:
    """`message` as it waits in the delay topic; it and its properties are changed. Levels end with the last."""
    level = min(level, max_level)
    properties[names.DELAY] = str(level)
    properties[names.REAL_TOPIC] = message.topic
    properties[names.REAL_QID] = str(message.queue_id)
    message.topic = SCHEDULE_TOPIC
    message.queue_id = level - 1
    message.properties = stored_text(properties)
    return message


def without_timer(properties: dict[str, str]) -> dict[str, str]:
    """The properties without a time: where a message has a delay level, too, that one counts."""
    for name in names.TIMER_PROPERTIES:
        properties.pop(name, None)
    return properties


def delivered(kept: KeptMessage) -> NewMessage | None:
    """The message that a record of the delay topic stands for; None when it does not say where it belongs."""
    topic, queue_id = kept.find(names.REAL_TOPIC), kept.find(names.REAL_QID)
    if topic is None or topic == HALF_TOPIC or queue_id is None or not queue_id.isdecimal():
        return None
    message = kept.message
    message.topic = topic
    message.queue_id = int(queue_id)
    return message


def stored_text(properties: Mapping[str, str]) -> bytes:
    """Property text as 4.9 stores it: no separator at the end."""
    pairs = [f"{name}\x01{value}" for name, value in properties.items() if value]
    return names.PROPERTY_SEPARATOR.join(pairs).encode()
