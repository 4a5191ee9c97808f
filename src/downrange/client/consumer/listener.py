"""The user's function that consumes messages: plain or async, one message or a batch at a time."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.retry import Answer
from downrange.settings import ConfigError

OnMessage = Callable[[ReceivedMessage], Answer | Awaitable[Answer]]
"""Returns None when the message is done, `Later(…)` when it is to come again; an exception means later, too."""
OnBatch = Callable[[Sequence[ReceivedMessage]], Answer | Awaitable[Answer]]
"""The same for a batch; `Acknowledged(n)` says that only the first n messages are done."""


class Listener:
    """One function for messages in batches of `batch_size` or fewer, whatever kind of function the user gave.

    `is_async` tells whether `call` must be awaited on the event loop, or may block and belongs into a thread.
    """

    def __init__(self, on_message: OnMessage | None, on_batch: OnBatch | None, batch_size: int) -> None:
        if (on_message is None) == (on_batch is None):
            raise ConfigError("give either on_message or on_batch")
        function = on_message if on_message is not None else on_batch
        if not callable(function):
            raise ConfigError(f"the callback {function!r} cannot be called")
        self._function: Callable[[Any], Any] = function
        self.takes_batches = on_batch is not None
        self.batch_size = batch_size if self.takes_batches else 1
        self.is_async = is_async(function)

    def __repr__(self) -> str:
        kind = "async" if self.is_async else "plain"
        return f"<Listener {kind} {getattr(self._function, '__qualname__', self._function)!s}>"

    def call(self, messages: Sequence[ReceivedMessage]) -> Any:
        """The function's answer, or an awaitable for it."""
        return self._function(messages if self.takes_batches else messages[0])

    async def consume(self, messages: Sequence[ReceivedMessage]) -> object:
        """The function's answer, awaited or computed in a thread."""
        return await self.call(messages) if self.is_async else await asyncio.to_thread(self.call, messages)


def is_async(function: object) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
