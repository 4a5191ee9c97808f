"""Messages that go from one cluster to another and stay what they were: their time of birth and their id are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from downrange.client.compression import compress
from downrange.client.producer.outgoing import (
    SEND,
    InvalidBatch,
    Outgoing,
    OutgoingRules,
    batches,
    check_batch,
    properties_text,
)
from downrange.model.message import Message


@dataclass(slots=True)
class ForwardedMessage(Message):
    """A message that another broker stored before; any producer may send it."""

    born_timestamp: int = 0
    message_id: str = ""
    """The unique id that its first producer gave it."""


def make_forwarded(message: ForwardedMessage, topic: str, rules: OutgoingRules) -> Outgoing:
    """The request of one forwarded message. Its body is not checked: another broker took it already."""
    properties = properties_text(message, message.message_id) + rules.last
    body, sys_flag = message.body, 0
    if len(body) >= rules.compress_over_bytes:
        body, sys_flag = compress(body, rules.compression, rules.compression_level)
    ids = (message.message_id,)
    return Outgoing(SEND, topic, body, sys_flag, message.flag, properties, ids, (message,), message.born_timestamp)


def make_forwarded_batch(messages: Sequence[Message], topic: str, rules: OutgoingRules) -> Sequence[Outgoing]:
    """The requests of forwarded messages of one time of birth, which a request has once for all its messages."""
    check_batch(messages)
    members = tuple(message for message in messages if isinstance(message, ForwardedMessage))
    if len(members) < len(messages) or len({message.born_timestamp for message in members}) > 1:
        raise InvalidBatch("a batch of forwarded messages has forwarded messages of one time of birth only")
    ids = iter([message.message_id for message in members])
    return list(batches(members, topic, lambda: next(ids), members[0].born_timestamp, rules))
