"""Trace entries of messages that a simple consumer holds: one when a message is received, one when it is settled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from downrange.client.consumer.delivery_trace import DeliveryTrace, Handed, start_delivery_trace
from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.client.consumer.retry import Later
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.session import Session
from downrange.model.message import MessageQueue

# Messages that were received and never settled: the oldest are forgotten first.
MAX_HELD: Final = 20_000


class LeaseTrace:
    """Reports each message by itself, because each is acknowledged by itself. For the event loop's thread.

    A message whose time ran out has no second entry: it reads as one that was not ended, and its next delivery has
    entries of its own.
    """

    def __init__(self, trace: DeliveryTrace) -> None:
        self._trace = trace
        self._held: dict[tuple[MessageQueue, int], Handed] = {}

    def __repr__(self) -> str:
        return f"<LeaseTrace held={len(self._held)}>"

    def received(self, messages: Iterable[PoppedMessage]) -> None:
        for message in messages:
            handed = self._trace.begin((message,))
            if handed.traced:
                self._held[message.queue, message.queue_offset] = handed
        while len(self._held) > MAX_HELD:
            del self._held[next(iter(self._held))]

    def acknowledged(self, messages: Iterable[PoppedMessage]) -> None:
        for message in messages:
            self._end(message, None)

    def given_up(self, message: PoppedMessage) -> None:
        """The message is a dead letter now."""
        self._end(message, Later())

    def _end(self, message: PoppedMessage, answer: Later | None) -> None:
        handed = self._held.pop((message.queue, message.queue_offset), None)
        if handed is not None:
            self._trace.end(handed, answer)

    async def close(self) -> None:
        """Write the entries that wait."""
        await self._trace.writer.close()


async def start_lease_trace(session: Session, group: str, config: SimpleConsumerConfig) -> LeaseTrace:
    """Reports of one simple consumer, until they are closed."""
    return LeaseTrace(await start_delivery_trace(session, group, config, math.inf))
