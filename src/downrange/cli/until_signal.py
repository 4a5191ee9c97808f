"""Work that ends early, but in order, on Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class StopRequest:
    """Set by the first signal. A second one ends the process at once."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def is_made(self) -> bool:
        return self._asked.is_set()

    def make(self) -> None:
        if self._asked.is_set():
            os._exit(130)  # not sys.exit, which would wait for a thread that is stuck in writing to a terminal
        self._asked.set()

    async def or_result(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, or None when a signal came first; then `work` is cancelled."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            asked.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    loop = asyncio.get_running_loop()
    request = StopRequest()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, request.make)
    try:
        yield request
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
