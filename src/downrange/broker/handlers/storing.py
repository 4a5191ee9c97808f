"""The messages that one request wants stored, and the way to answer this request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from downrange.protocol.command import Command
from downrange.store.new_message import NewMessage, Refusal
from downrange.store.new_messages import Place
from downrange.transport.connection import Connection


class Storing(msgspec.Struct, gc=False):
    """Messages that one request wants stored, together or not at all."""

    group: Sequence[NewMessage]
    refused: Callable[[Command, Refusal], Command]
    """Makes the reply when the store does not take them."""
    queue_id: int = 0
    """The queue that the sender of a message is told."""
    waits: bool = True
    """Whether the request is answered when its messages are as safe as the broker promises, or when they are stored."""
    reply: Command | None = None
    """The reply; None when it says where the messages lie."""
    then: Callable[[Sequence[Place]], None] | None = None
    """Called with the places of the messages once they are stored."""
    key: object = None
    """Two requests with one key are never stored in one batch: the second one depends on what the first one did."""
    recall_handle: str | None = None
    """What the sender of a timer message can recall it with."""
    makes_topic: bool = False
    """Whether this is the first message of a topic: then the name servers are told before the sender."""


Reader = Callable[[Command, Connection], Storing | Command | None]
"""Reads one request: what to store for it, or its reply, or None when it gets none. It may raise MQError."""
