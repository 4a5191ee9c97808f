"""One event loop and one session per cluster for each Python process of Spark; they outlive single tasks.

The loop runs only while a caller waits for it, in the thread of the caller: a task alternates between waiting for pulls
and decoding, and a second thread would only compete for the interpreter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.transport.loop import loop_factory

T = TypeVar("T")

_TURNS_TO_CATCH_UP: Final = 4
"""One turn to read the end of a connection, one to close it, one to tell the pool, and one in reserve."""


class WorkerLoop:
    """The loop and the sessions of this process. Made by `worker_loop` only; used by one thread."""

    def __init__(self) -> None:
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._sessions: dict[ClientConfig, Session] = {}

    def run(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(work)

    def catch_up(self) -> None:
        """Notice connections that a server closed while the loop did not run."""

        async def turn() -> None:
            for _ in range(_TURNS_TO_CATCH_UP):
                await asyncio.sleep(0)

        self.run(turn())

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work`; it progresses whenever `run` is called."""
        return self._loop.create_task(work)

    def session(self, config: ClientConfig) -> Session:
        if config not in self._sessions:

            async def make() -> Session:
                return Session(config)

            self._sessions[config] = self.run(make())
        return self._sessions[config]

    def close(self) -> None:
        for session in self._sessions.values():
            self.run(session.close())
        self._sessions.clear()
        self._loop.close()


_current: tuple[int, WorkerLoop] | None = None


def worker_loop() -> WorkerLoop:
    """The loop of this process. A forked child makes its own: it must not use the sockets of its parent."""
    global _current
    if _current is None or _current[0] != os.getpid():
        _current = (os.getpid(), WorkerLoop())
    _current[1].catch_up()
    return _current[1]
