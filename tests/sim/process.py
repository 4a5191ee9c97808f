"""The processes of a simulated cluster, the machines they run on, and their clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.sim.loop import Handle, SimLoop, Sleep

EPOCH_MILLIS: Final = 1_700_000_000_000


class State(Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    """By SIGSTOP: it does nothing, and its connections stay."""
    DEAD = "dead"


class Machine:
    """A host with an address and a wall clock of its own."""

    def __init__(self, name: str, address: str, clock: SimClock) -> None:
        self.name = name
        self.address = address
        self.is_up = True
        self.clock = clock
        self.ports = count(10_000)

    def __repr__(self) -> str:
        return f"<Machine {self.name} {self.address}>"


class SimClock:
    """A machine's clock: `step_millis` is how far its wall clock is from the true time."""

    def __init__(self, loop: SimLoop, sleep: Callable[[SimLoop, float], Sleep]) -> None:
        self._loop = loop
        self.step_millis = 0
        self.sleep: Callable[[float], Any] = partial(sleep, loop)

    def now(self) -> int:
        return EPOCH_MILLIS + self.step_millis + int(self._loop._now * 1000)

    def monotonic(self) -> float:
        return self._loop._now


class Process:
    """One run of a program. Whatever it starts, now or later, belongs to it."""

    _numbers = count(1000)

    def __init__(self, name: str, machine: Machine, loop: SimLoop) -> None:
        self.name = name
        self.machine = machine
        self.process_id = next(self._numbers)
        self.state = State.RUNNING
        self.pause_seconds = 0.0
        """A slow process pauses so long before every callback."""
        self.is_at_full_speed = True
        self.free_at = 0.0
        """A slow process has done all that came before by this time."""
        self.held: list[Handle] = []
        """The callbacks that wait while the process is stopped."""
        self._loop = loop
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.state.value}>"

    def start(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(main, name=self.name, context=self.context)

    def stop(self) -> None:
        if self.state is State.RUNNING:
            self._be(State.STOPPED)

    def _be(self, state: State) -> None:
        self.state = state
        self.is_at_full_speed = state is State.RUNNING and self.pause_seconds == 0.0

    def pause(self, seconds: float) -> None:
        """From now on pause so long before every callback."""
        self.pause_seconds = seconds
        self._be(self.state)

    def go_on(self) -> None:
        if self.state is State.STOPPED:
            self._be(State.RUNNING)
            held, self.held = self.held, []
            for handle in held:
                self._loop._soon.append(handle)

    def kill(self) -> None:
        """End at once."""
        self._be(State.DEAD)
        self.held.clear()


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process:
    process = CURRENT.get()
    assert process is not None, "this runs in no simulated process"
    return process
