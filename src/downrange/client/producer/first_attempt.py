"""The first attempt of a send, as far as it took no waiting."""

from __future__ import annotations

import msgspec

from downrange.client.producer.messages import Outgoing
from downrange.client.producer.publish_info import PublishInfo
from downrange.client.producer.retry import SendKind
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.protocol.command import Command


class FirstAttempt(msgspec.Struct):
    """What goes where, how long it may take, how it ended."""

    ready: Outgoing
    kind: SendKind
    info: PublishInfo
    queue: MessageQueue
    begun: float
    deadline: float
    seconds: float
    address: str | None
    ended: Command | MQError | None = None
    is_unasked: bool = False
    """The broker was not asked: that takes waiting, or cannot be done."""
