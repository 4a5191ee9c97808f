"""A callback whose calls are reported to the trace topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from downrange.client.consumer.delivery_trace import DeliveryTrace
from downrange.client.consumer.listener import Listener
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.workers import NotConsumed


class TracedListener(Listener):
    """Calls the listener it is made from, and reports each message before the call and after it.

    `trace` is set when the consumer starts; nothing is called before. Calls may come from any thread.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.takes_batches = listener.takes_batches
        self.batch_size = listener.batch_size
        self.is_async = listener.is_async
        self.trace: DeliveryTrace

    def __repr__(self) -> str:
        return f"<TracedListener {self._listener!r}>"

    def call(self, messages: Sequence[ReceivedMessage]) -> Any:
        if self.is_async:
            return self._await(messages)
        handed = self.trace.begin(messages)
        try:
            answer = self._listener.call(messages)
        except BaseException as error:
            self.trace.end(handed, error=error)
            raise
        self.trace.end(handed, answer)
        return answer

    async def _await(self, messages: Sequence[ReceivedMessage]) -> Any:
        handed = self.trace.begin(messages)
        try:
            answer = await self._listener.call(messages)
        except NotConsumed:
            raise
        except Exception as error:
            self.trace.end(handed, error=error)
            raise
        self.trace.end(handed, answer)
        return answer

    async def consume(self, messages: Sequence[ReceivedMessage]) -> object:
        """For an operator who asked for it: not part of what the group does, so not traced."""
        return await self._listener.consume(messages)
