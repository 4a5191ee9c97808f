"""Requests that wait for their replies: each ends once and in time, with one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from downrange.protocol.command import Command
from downrange.transport.errors import ConnectionLost, RequestTimedOut
from downrange.transport.outstanding import Outstanding


class Timer:
    def __init__(self, at: float, function: Callable[[], None]) -> None:
        self.at = at
        self.function = function
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class StoppedLoop:
    """The part of a loop that `Outstanding` uses; time moves when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, function: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, function))
        return self.timers[-1]

    def waiting(self) -> list[Timer]:
        return [timer for timer in self.timers if not timer.is_cancelled]

    def advance(self, until: float) -> None:
        while due := [timer for timer in self.waiting() if timer.at <= until]:
            first = min(due, key=lambda timer: timer.at)
            self.now = max(self.now, first.at)
            first.cancel()
            first.function()
        self.now = until


class Waiter:
    """Remembers what it was told and when."""

    def __init__(self, loop: StoppedLoop) -> None:
        self._loop = loop
        self.told: list[tuple[float, Command | BaseException]] = []
        self.is_cancelled = False

    def done(self) -> bool:
        return self.is_cancelled or bool(self.told)

    def set_result(self, reply: Command, /) -> None:
        self.told.append((self._loop.now, reply))

    def set_exception(self, error: BaseException, /) -> None:
        self.told.append((self._loop.now, error))


def outstanding(loop: StoppedLoop, on_room: Callable[[], None] = lambda: None) -> Outstanding:
    return Outstanding(cast(asyncio.AbstractEventLoop, loop), on_room)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 5)), min_size=1, max_size=20))
def test_each_request_times_out_at_its_own_time_whatever_the_others(requests: list[tuple[float, float]]) -> None:
    loop = StoppedLoop()
    asked = outstanding(loop)
    waiters = []
    for opaque, (pause, timeout) in enumerate(requests):
        loop.advance(loop.now + pause)
        waiter = Waiter(loop)
        asked.add(opaque, waiter, 10, timeout)
        waiters.append((waiter, loop.now + timeout))
    loop.advance(loop.now + 6)
    for waiter, deadline in waiters:
        ((when, error),) = waiter.told
        assert isinstance(error, RequestTimedOut)
        assert abs(when - deadline) <= 0.001001
    assert not asked.requests
    assert not loop.waiting()


def test_requests_that_are_answered_need_next_to_no_timers() -> None:
    loop = StoppedLoop()
    asked = outstanding(loop)
    for opaque in range(10_000):
        asked.add(opaque, Waiter(loop), 10, 3.0)
        asked.requests.pop(opaque)
        loop.advance(loop.now + 0.001)
    assert len(loop.timers) <= 5  # ten seconds of requests, three seconds each
    loop.advance(loop.now + 3)
    assert not loop.waiting()


def test_a_request_without_a_time_limit_has_no_timer() -> None:
    loop = StoppedLoop()
    asked = outstanding(loop)
    asked.add(1, Waiter(loop), 10, float("inf"))
    assert not loop.timers


def test_what_was_given_up_makes_room_and_is_told_nothing() -> None:
    loop = StoppedLoop()
    rooms: list[None] = []
    asked = outstanding(loop, lambda: rooms.append(None))
    given_up, waiting = Waiter(loop), Waiter(loop)
    asked.add(1, given_up, 10, 3.0)
    asked.add(2, waiting, 10, 3.0)
    given_up.is_cancelled = True
    asked.forget_given_up()
    assert list(asked.requests) == [2]
    assert len(rooms) == 1
    loop.advance(loop.now + 4)
    assert not given_up.told
    assert len(waiting.told) == 1
    assert len(rooms) == 2


def test_a_lost_connection_is_told_to_all_and_leaves_no_timer() -> None:
    loop = StoppedLoop()
    asked = outstanding(loop)
    waiters = [Waiter(loop) for _ in range(3)]
    for opaque, waiter in enumerate(waiters):
        asked.add(opaque, waiter, 10, 3.0)
    asked.fail_all(lambda: ConnectionLost("gone"))
    assert [str(waiter.told[0][1]) for waiter in waiters] == ["gone"] * 3
    assert not loop.waiting()
