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
from downrange.store.new_message import AppendResult, NewMessage

REMOVE_TAG: Final = "d"
_COMMIT: Final = int(SysFlag.TRANSACTION_COMMIT)
_OP_PROPERTIES: Final = b"WAIT\x01true\x02TAGS\x01d"


def half(message: NewMessage, properties: dict[str, str]) -> NewMessage:
    """A message of a producer as it waits for the end of its transaction."""
    waiting = {**properties, names.REAL_TOPIC: message.topic, names.REAL_QID: str(message.queue_id)}
    message.topic = HALF_TOPIC
    message.queue_id = 0
    message.sys_flag &= ~TRANSACTION_MASK
    message.properties = stored_text(waiting)
    return message


def committed(stored: StoredMessage) -> NewMessage | None:
    """The message consumers get; None when the half message does not say where it belongs.

    Its properties are those of the half message, REAL_TOPIC, REAL_QID and TRAN_MSG included, as in RocketMQ.
    """
    topic, queue_id = real_topic(stored), find_property(stored.properties_text, names.REAL_QID)
    if not topic or queue_id is None or not queue_id.isdecimal():
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
        sys_flag=stored.sys_flag & ~TRANSACTION_MASK | _COMMIT,
        reconsume_times=stored.reconsume_times,
        prepared_transaction_offset=stored.physical_offset,
    )


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


def ended_offsets(op: StoredMessage) -> list[int]:
    """The half messages an op message says have ended: one as 4.9 writes it, or several with commas as 5.x does."""
    if op.tags != REMOVE_TAG:
        return []
    return [int(text) for text in op.body.split(b",") if text.isdigit()]


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


def real_topic(stored: StoredMessage) -> str:
    """The topic a half message is meant for."""
    return find_property(stored.properties_text, names.REAL_TOPIC) or ""


def number(stored: StoredMessage, name: str) -> int | None:
    """A property that is a number; None when it is absent, -1 when it is something else."""
    text = find_property(stored.properties_text, name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        return -1
