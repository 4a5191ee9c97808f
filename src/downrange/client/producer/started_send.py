"""A send between its aim and its end, and the places it can be aimed at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from downrange.client.producer.outgoing import Outgoing, Target
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.retry import SendKind
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue
from downrange.protocol.command import Command

Selector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
"""Picks the queue of an ordered message out of all that may be written, whose order is the same for every producer."""


Aim = tuple[Message, SendKind, PublishInfo, Target, float, float, float]
"""The first fields of a StartedSend. A plain tuple, because there is one for every send."""


class StartedSend(msgspec.Struct):
    """A send up to its first attempt: what goes where, how long it may take, how the attempt ended."""

    message: Message
    kind: SendKind
    info: PublishInfo
    target: Target
    begun: float
    deadline: float
    seconds: float
    """How long the first attempt may take."""
    ready: Outgoing | None = None
    """The request, once it was made."""
    ended: Command | MQError | None = None
    """The reply or error of the first attempt, unless the message was stored or no attempt was made."""


class Destination(NamedTuple):
    """What is known of a topic that messages can be sent to at once: its name on the wire, and a target per queue."""

    route_changes: int
    """`Session.route_changes` when this was made."""
    topic: str
    info: PublishInfo
    targets: tuple[Target, ...]
    by_queue: dict[MessageQueue, Target]
