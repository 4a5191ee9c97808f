"""What a transactional message is stored as at each step of its life."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from downrange.broker.delayed import stored_text
from downrange.model import properties as names
from downrange.model.message import TRANSACTION_MASK, PhysicalOffset, QueueOffset, StoredMessage, SysFlag
from downrange.model.message_id import pack_host
from downrange.model.properties import find_property
from downrange.model.topics import CHECK_MAX_TIME_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from downrange.store.kept_message import KeptMessage
from downrange.store.new_message import AppendResult, NewMessage

_COMMIT: Final = int(SysFlag.TRANSACTION_COMMIT)
_OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d"


def half(message: NewMessage, properties: dict[str, str]) -> NewMessage:
    """A message of a producer as it waits for the end of its transaction; it and its properties are changed."""
    properties[names.REAL_TOPIC] = message.topic
    properties[names.REAL_QID] = str(message.queue_id)
    # The broker's own note about a copy: a producer that sets it would end the transaction of somebody else.
    properties.pop(names.TRAN_PREPARED_QUEUE_OFFSET, None)
    message.topic = HALF_TOPIC
    message.queue_id = 0
    message.sys_flag &= ~TRANSACTION_MASK
    message.properties = stored_text(properties)
    return message


def committed(half_message: KeptMessage) -> NewMessage | None:
    """The message consumers get; None when the half message does not say where it belongs.

    Its properties are those of the half message, REAL_TOPIC, REAL_QID and TRAN_MSG included, as in RocketMQ.
    """
    topic, queue_id = real_topic(half_message.text), half_message.find(names.REAL_QID)
    if not topic or queue_id is None or not queue_id.isdecimal():
        return None
    message = half_message.message
    message.topic = topic
    message.queue_id = int(queue_id)
    message.sys_flag = message.sys_flag & ~TRANSACTION_MASK | _COMMIT
    message.prepared_transaction_offset = half_message.physical_offset
    return message


def operation(half_offset: int, queue_id: int, now: int, broker_host: bytes) -> NewMessage:
    """The note that the half message with this queue offset has ended."""
    return NewMessage(
        topic=OP_HALF_TOPIC,
        queue_id=queue_id,
        body=b"%d" % half_offset,
        properties=_OP_PROPERTIES,
        born_timestamp=now,
        born_host=broker_host,
        store_host=broker_host,
    )


def again(stored: StoredMessage, changes: dict[str, str]) -> NewMessage:
    """A copy of a half message for the end of the half queue, with some properties changed."""
    return _moved(stored, HALF_TOPIC, {**stored.properties, **changes})


def given_up(stored: StoredMessage) -> NewMessage:
    """A half message that nobody could decide, as it is kept for an operator."""
    return _moved(stored, CHECK_MAX_TIME_TOPIC, stored.properties)


def resumed(stored: StoredMessage) -> NewMessage:
    """A message that had been given up, on its way back."""
    properties = {**stored.properties, names.TRANSACTION_CHECK_TIMES: "0"}
    properties.pop(names.TRAN_PREPARED_QUEUE_OFFSET, None)
    return _moved(stored, HALF_TOPIC, properties)


def _moved(stored: StoredMessage, topic: str, properties: dict[str, str]) -> NewMessage:
    return NewMessage(
        topic=topic,
        queue_id=0,
        body=stored.body,
        properties=stored_text(properties),
        born_timestamp=stored.born_timestamp,
        born_host=pack_host(*stored.born_host),
        store_host=pack_host(*stored.store_host),
        flag=stored.flag,
        sys_flag=stored.sys_flag,
        reconsume_times=stored.reconsume_times,
    )


def asked_about(stored: StoredMessage, copy: NewMessage, result: AppendResult) -> StoredMessage:
    """The half message as a producer is shown it: at home in its real topic, at the place of the newest copy."""
    text = copy.properties.decode()
    properties = {**names.decode_properties(text), names.WAIT: "false"}
    queue_id = properties.get(names.REAL_QID, "")
    return replace(
        stored,
        topic=properties.get(names.REAL_TOPIC, ""),
        queue_id=int(queue_id) if queue_id.isdecimal() else 0,
        queue_offset=QueueOffset(result.queue_offset),
        physical_offset=PhysicalOffset(result.physical_offset),
        properties_text=stored_text(properties).decode(),
    )


def real_topic(text: str) -> str:
    """The topic that a half message with these properties is meant for."""
    return find_property(text, names.REAL_TOPIC) or ""


def number(text: str, name: str) -> int | None:
    """A property that is a number; None when it is absent, -1 when it is something else."""
    value = find_property(text, name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        return -1
