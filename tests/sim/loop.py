"""An event loop whose time is simulated: it never waits, and what runs next depends on nothing outside.

Every callback belongs to the simulated process in whose context it was made (`machine.current`). Callbacks of a process
that was killed are dropped, those of a stopped one wait until it goes on, those of a slow one come late.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from asyncio import events
from collections import deque
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from heapq import heappop, heappush
from typing import Any, Final

import msgspec

from tests.sim.process import CURRENT, Process, State

TURN_SECONDS: Final = 1e-6
"""Time that passes with every turn, so that code which waits for the clock in a loop gets on."""
SHORTEST_STEP_SECONDS: Final = 20e-6
LONGEST_STEP_SECONDS: Final = 2e-3


class NothingToDo(RuntimeError):
    """Every task waits for something that will never come."""


class Handle(msgspec.Struct, eq=False):
    """A callback that waits for its turn. If it was cancelled, the callback is None.

    It stands for `asyncio.Handle`, and takes a fraction of the time to make.
    """

    callback: Callable[..., Any] | None
    arguments: tuple[Any, ...]
    context: Context

    def cancel(self) -> None:
        """It is dropped when its turn comes."""
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None


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
        """Objects that must not be collected before the end. These are all tasks: one that is collected runs its
        `finally` blocks, and tasks of a process that was killed must not."""

    def time(self) -> float:
        return self._now

    # --- when callbacks run -------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self._count += 1
        heappush(self._timers, (when, self._count, handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context)
        self.run_later(delay, handle)
        return handle

    def run_later(self, delay: float, handle: Handle) -> None:
        """As `call_later`. Whoever has a handle already may use it again and again."""
        self._count += 1
        heappush(self._timers, (self._now + delay, self._count, handle))

    def run_forever(self) -> None:
        hooks = sys.get_asyncgen_hooks()
        self._thread_id = threading.get_ident()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        events._set_running_loop(self)
        try:
            self._run_callbacks()
        finally:
            self._stopping = False
            self._thread_id = None  # type: ignore[assignment]
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_callbacks(self) -> None:
        """Turn by turn, until the loop is stopped: callbacks that a turn makes wait for the next one."""
        timers, soon = self._timers, self._soon
        while not self._stopping:
            if not soon:
                while timers and timers[0][2].callback is None:
                    heappop(timers)
                if not timers:
                    raise NothingToDo(f"no task can go on at {self._now:.3f} s")
                when, _, handle = heappop(timers)
                self._now = when if when > self._now else self._now
                soon.append(handle)
            now = self._now
            while timers and timers[0][0] <= now:
                soon.append(heappop(timers)[2])
            for _ in range(len(soon)):
                handle = soon.popleft()
                callback = handle.callback
                if callback is None:
                    continue
                context = handle.context
                process = context.get(CURRENT)
                if process is not None and not process.is_at_full_speed:
                    self._hold_up(process, handle)
                    continue
                try:
                    context.run(callback, *handle.arguments)
                except Exception as error:
                    self._tell_error(handle, error)
            self._now += TURN_SECONDS

    def _tell_error(self, handle: Handle, error: Exception) -> None:
        message = f"error in {handle.callback}"
        handle.context.run(self.call_exception_handler, {"message": message, "exception": error})

    def _hold_up(self, process: Process, handle: Handle) -> None:
        """A callback of a process that does not run at full speed."""
        if process.state is State.STOPPED:
            process.held.append(handle)
        elif process.state is State.RUNNING:
            process.free_at = max(process.free_at, self._now) + process.pause_seconds
            self.call_at(process.free_at, self._run_late, process, handle, context=self._no_process)

    def _run_late(self, process: Process, handle: Handle) -> None:
        callback = handle.callback
        if callback is None or process.state is State.DEAD:
            return
        if process.state is State.STOPPED:
            process.held.append(handle)
            return
        try:
            handle.context.run(callback, *handle.arguments)
        except Exception as error:
            self._tell_error(handle, error)

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

    get_debug = staticmethod(bool)
    """False. Every future and task asks, and `bool` is the quickest answer."""

    def _process_events(self, event_list: object) -> None:
        """There are no events but timers."""

    def _write_to_self(self) -> None:
        """There is only one thread."""


class Sleep(Handle, eq=False):
    """A future that is done after some seconds, and the handle of the timer that says so.

    The loop calls whoever waits for it when the time has come. `asyncio.sleep` takes a coroutine, a future and another
    turn of the loop for that.
    """

    _loop: SimLoop
    """asyncio reads it, too: there is no `get_loop` that it could call."""
    _ends_at: float
    _number: int
    _asyncio_future_blocking: bool = False
    _is_cancelled: bool = False
    _waiting: list[tuple[Callable[[Any], Any], Context]] | None = None
    """Who waits, if that is not the only one whom the timer itself calls."""

    def __hash__(self) -> int:
        return self._number

    def __await__(self) -> Generator[Sleep, None, None]:
        if self._loop._now < self._ends_at and not self._is_cancelled:
            self._asyncio_future_blocking = True
            yield self
        if self._is_cancelled:
            raise asyncio.CancelledError

    def done(self) -> bool:
        return self._is_cancelled or self._loop._now >= self._ends_at

    def cancelled(self) -> bool:
        return self._is_cancelled

    def result(self) -> None:
        self.arguments = ()  # nothing collects an object that holds itself
        if self._is_cancelled:
            raise asyncio.CancelledError

    exception = result

    def cancel(self, msg: object = None) -> bool:  # type: ignore[override]
        if self.done():
            return False
        self._is_cancelled = True
        self._tell()
        self.callback = None
        return True

    def add_done_callback(self, callback: Callable[[Any], Any], *, context: Context | None = None) -> None:
        if context is None:
            context = copy_context()
        if self.done():
            self._loop.call_soon(callback, self, context=context)
        elif self.callback is _nobody:
            self.callback, self.arguments, self.context = callback, (self,), context
        else:
            self._waiting = [*self._all_waiting(), (callback, context)]
            self.callback, self.arguments, self.context = self._tell, (), context

    def remove_done_callback(self, callback: Callable[[Any], Any]) -> int:
        waiting = self._all_waiting()
        self._waiting = [one for one in waiting if one[0] != callback]
        self.callback, self.arguments = self._tell, ()
        return len(waiting) - len(self._waiting)

    def _all_waiting(self) -> list[tuple[Callable[[Any], Any], Context]]:
        if self._waiting is not None:
            return self._waiting
        callback = self.callback
        return [] if callback is None or callback is _nobody else [(callback, self.context)]

    def _tell(self) -> None:
        waiting, self._waiting = self._all_waiting(), []
        for callback, context in waiting:
            self._loop.call_soon(callback, self, context=context)


def sleep(loop: SimLoop, seconds: float) -> Sleep:
    """Begin to sleep."""
    loop._count = number = loop._count + 1
    ends_at = loop._now + seconds
    begun = Sleep(_nobody, (), loop._no_process, loop, ends_at, number)
    heappush(loop._timers, (ends_at, number, begun))
    return begun


def _nobody() -> None:
    """Nobody waits for a sleep yet."""
