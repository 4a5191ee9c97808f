"""Hooks: functions of the user that are called around every attempt to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from downrange.client.producer.retry import SendKind
from downrange.client.producer.send_result import SendResult
from downrange.model.errors import MQError
from downrange.model.message import Message, MessageQueue


@dataclass(slots=True)
class SendContext:
    """One attempt to send, as hooks see it: without results before it, with results or an error after it.

    `notes` is for the hooks themselves, to keep values from before the attempt until after it.
    """

    producer_group: str
    namespace: str
    kind: SendKind
    messages: Sequence[Message]
    message_ids: Sequence[str]
    queue: MessageQueue
    broker_address: str
    started: int
    """Milliseconds since 1970."""
    cost_millis: float = 0.0
    results: Sequence[SendResult] = ()
    error: MQError | None = None
    region_id: str | None = None
    trace_on: bool = True
    is_half: bool = False
    """The message belongs to a transaction that has not ended yet."""
    notes: dict[str, Any] = field(default_factory=dict)


class SendHook(Protocol):
    """Called around every attempt, on the event loop: it must not block. Its errors are logged and change nothing."""

    def before_send(self, context: SendContext) -> None: ...

    def after_send(self, context: SendContext) -> None: ...
