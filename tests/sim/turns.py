"""Code that blocks, in a simulation of one thread: it has a thread of its own, and the two take turns.

    loop    ── go on ──▶  thread runs …  ── `run(work)` ──▶  loop does the work  ── its result ──▶  thread runs …

Exactly one of the two runs at any moment, so nothing depends on the machine. The thread of a process that was killed
waits for ever, and ends with the process of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from threading import Semaphore, Thread
from typing import Any, TypeVar

from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.clock import Clock
from downrange.spark.worker_loop import WorkerLoop

T = TypeVar("T")


class TurnLoop(WorkerLoop):
    """Stands for the loop of a Spark worker: what its caller waits for is done by the loop of the simulation."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._sessions: dict[ClientConfig, Session] = {}
        self._thread_goes = Semaphore(0)
        self._loop_goes = Semaphore(0)
        self._work: Awaitable[Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, work: Awaitable[T]) -> T:
        """For the thread: let the loop go on until the work is done."""
        self._work = work
        self._loop_goes.release()
        self._thread_goes.acquire()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[no-any-return]

    def sleep(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    def session(self, config: ClientConfig) -> Session:
        if config not in self._sessions:

            async def make() -> Session:
                return Session(config, clock=self._clock)

            self._sessions[config] = self.run(make())
        return self._sessions[config]

    async def drive(self, function: Callable[[], T]) -> T:
        """For the loop: call `function` in a thread, and do what it waits for."""
        ended: list[T] = []
        errors: list[BaseException] = []

        def in_thread() -> None:
            self._thread_goes.acquire()
            try:
                ended.append(function())
            except BaseException as error:
                errors.append(error)
            self._work = None
            self._loop_goes.release()

        Thread(target=copy_context().run, args=(in_thread,), daemon=True).start()
        while True:
            self._thread_goes.release()
            self._loop_goes.acquire()
            if errors:
                raise errors[0]
            if self._work is None:
                return ended[0]
            try:
                self._result, self._error = await self._work, None
            except Exception as error:
                self._result, self._error = None, error
