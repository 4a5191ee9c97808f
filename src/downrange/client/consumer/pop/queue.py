"""The messages that a push consumer popped from one assigned queue, or from all queues of a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from downrange.client.consumer.pop.messages import PoppedMessage
from downrange.model.message import MessageQueue


class PopQueue:
    """An assigned queue (-1: all queues of its broker) and its messages from their pop to their end. [PopProcessQueue]

    After `drop` no callback is begun; those that run count, for their messages are leased to us. Used on the consumer's
    event loop only.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.is_dropped = False
        self.last_pop_millis = 0
        self._held: set[PoppedMessage] = set()
        self._room = asyncio.Event()

    def __repr__(self) -> str:
        return f"<PopQueue {self.queue} messages={len(self._held)}{' dropped' if self.is_dropped else ''}>"

    @property
    def message_count(self) -> int:
        return len(self._held)

    def put(self, messages: Iterable[PoppedMessage]) -> None:
        self._held.update(messages)

    def finish(self, message: PoppedMessage) -> None:
        """The lease of a message is over for us: acknowledged, given back or lost."""
        self._held.discard(message)
        self._room.set()

    def drop(self) -> None:
        self.is_dropped = True
        self._room.set()

    async def wait_for_room(self) -> None:
        """Until a message was finished, or the queue was dropped."""
        self._room.clear()
        await self._room.wait()
