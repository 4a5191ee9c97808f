"""The types of messages and topics, and the queue of a message group. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from downrange.model import properties as names
from downrange.model.hashing import java_hash
from downrange.proxy.errors import Refused
from downrange.proxy.wire.enums import Code, MessageType

UNSPECIFIED: Final = "UNSPECIFIED"
MIXED: Final = "MIXED"
ACCEPTED: Final[Mapping[str, tuple[int, ...]]] = {
    "NORMAL": (MessageType.NORMAL,),
    "FIFO": (MessageType.FIFO,),
    "DELAY": (MessageType.DELAY,),
    "TRANSACTION": (MessageType.TRANSACTION,),
    MIXED: (MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION),
    UNSPECIFIED: (MessageType.MESSAGE_TYPE_UNSPECIFIED,),
}
"""The types that topics accept, by the value of their attribute `message.type`."""

_DELAYS: Final = (names.DELAY, "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS")
_MULTIPLIER: Final = 2862933555777941757
_MASK: Final = (1 << 64) - 1


def type_of(properties: Mapping[str, str]) -> MessageType:
    """The type of a message, which follows from its properties."""
    if properties.get(names.TRAN_MSG) == "true":
        return MessageType.TRANSACTION
    if any(properties.get(name, "0") != "0" for name in _DELAYS):
        return MessageType.DELAY
    return MessageType.FIFO if names.SHARDING_KEY in properties else MessageType.NORMAL


def check_type(expected: str, actual: MessageType) -> None:
    """Refuse a message that is not of the type of its topic."""
    if expected not in (MIXED, actual.name):
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {actual.name}",
        )


def queue_of_group(message_group: str, queues: int) -> int:
    """The queue of a message group: a hash that moves few groups when the number of queues changes."""
    state = java_hash(message_group) & _MASK
    candidate = 0
    while True:
        state = (state * _MULTIPLIER + 1) & _MASK
        step = int((candidate + 1) / (((state >> 33) + 1) / (1 << 31)))
        if step >= queues:
            return candidate
        candidate = step
