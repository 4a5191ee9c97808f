"""An event loop whose time is simulated: it never waits, and what runs next depends on nothing outside.

Every callback belongs to the simulated process in whose context it was made (`machine.current`). Callbacks of a process
that was killed are dropped, those of a stopped one wait until it goes on, those of a slow one come late.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio import Handle, TimerHandle
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final

from tests.sim.process import CURRENT, Process, State

TURN_SECONDS: Final = 1e-6
"""Time that passes with every turn, so that code which waits for the clock in a loop gets on."""
SHORTEST_STEP_SECONDS: Final = 20e-6
LONGEST_STEP_SECONDS: Final = 2e-3


class NothingToDo(RuntimeError):
    """Every task waits for something that will never come."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their simulated times; those of one time in the order in which they were made."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._now = 0.0
        self._count = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._soon: deque[Handle] = deque()
        self._no_process = Context()
        self.kept: list[object] = []
        """Objects that must not be collected before the end."""
        self.callbacks = 0
        """How many callbacks have run."""

    def time(self) -> float:
        return self._now

    # --- when callbacks run -------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        self._put(when, handle)
        return handle

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """A timer that was cancelled is dropped when its time comes."""

    def _put(self, when: float, handle: Handle) -> None:
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))

    def _run_once(self) -> None:
        timers, soon = self._timers, self._soon
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not soon:
            if not timers:
                raise NothingToDo(f"no task can go on at {self._now:.3f} s")
            self._now = max(self._now, timers[0][0])
        now = self._now
        while timers and timers[0][0] <= now:
            soon.append(heapq.heappop(timers)[2])
        for _ in range(len(soon)):
            handle = soon.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)  # type: ignore[attr-defined]
            if process is None or (process.state is State.RUNNING and process.pause_seconds == 0.0):
                self.callbacks += 1
                handle._run()
            else:
                self._hold_up(process, handle)
        self._now += TURN_SECONDS

    def _hold_up(self, process: Process, handle: Handle) -> None:
        """A callback of a process that does not run at full speed."""
        if process.state is State.STOPPED:
            process.held.append(handle)
        elif process.state is State.RUNNING:
            process.free_at = max(process.free_at, self._now) + process.pause_seconds
            self._put(process.free_at, Handle(self._run_late, (process, handle), self, self._no_process))

    def _run_late(self, process: Process, handle: Handle) -> None:
        if handle._cancelled or process.state is State.DEAD:
            return
        if process.state is State.STOPPED:
            process.held.append(handle)
        else:
            self.callbacks += 1
            handle._run()

    # --- what asyncio asks of a loop ----------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Work of a thread is one step that comes a little later; its result comes later still."""
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(self._step(), fail, error)
            else:
                self.call_later(self._step(), tell, result)

        def tell(result: Any) -> None:
            if not future.done():
                future.set_result(result)

        def fail(error: Exception) -> None:
            if not future.done():
                future.set_exception(error)

        self.call_later(self._step(), work)
        return future

    def _step(self) -> float:
        return self._chance.uniform(SHORTEST_STEP_SECONDS, LONGEST_STEP_SECONDS)

    def _process_events(self, event_list: object) -> None:
        """There are no events but timers."""

    def _write_to_self(self) -> None:
        """There is only one thread."""
