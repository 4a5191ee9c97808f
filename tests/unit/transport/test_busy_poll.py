"""When the loop turns for a lone caller, and when it sleeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from downrange.transport.busy_poll import ALIKE, FIRST_REST_SECONDS, LONGEST_REST_SECONDS, BusyPoll

MICRO = 1e-6


class Turns:
    """A loop and its clock: each turn takes a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready: deque[Callable[[], None]] = deque()
        self.poll = BusyPoll(self, 50 * MICRO, self.time)  # type: ignore[arg-type]

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None], *arguments: Any) -> None:
        self.ready.append(callback)

    def turn(self, most: int = 1000) -> int:
        """Turn until the loop would sleep; how often."""
        turns = 0
        while self.ready and turns < most:
            self.ready.popleft()()
            self.now += MICRO
            turns += 1
        return turns

    def ask(self, caller: object, times: int, pause: float = 100 * MICRO, requests: int = 1) -> int:
        """Requests with a pause between them; how often the loop turned for nothing."""
        turns = 0
        for _ in range(times):
            self.poll.answered(caller, requests)
            end = self.now + pause
            turns += self.turn(most=round(pause / MICRO))
            self.now = end
        return turns


def test_the_loop_turns_only_after_several_single_requests_of_one_caller() -> None:
    loop = Turns()
    assert loop.ask("one", ALIKE) == 0
    assert loop.ask("one", 1) > 0


def test_it_turns_for_as_long_as_was_said_and_then_sleeps() -> None:
    loop = Turns()
    loop.ask("one", ALIKE)
    assert 49 <= loop.ask("one", 1, pause=0.01) <= 52
    assert not loop.ready


def test_a_quick_caller_is_polled_for_again_and_again() -> None:
    loop = Turns()
    loop.ask("one", ALIKE)
    assert loop.ask("one", 1000, pause=20 * MICRO) == 1000 * 20


def test_a_caller_that_is_slower_soon_costs_one_poll_a_second() -> None:
    loop = Turns()
    loop.ask("one", ALIKE)
    assert loop.ask("one", 1000, pause=0.002) <= 11 * 52  # rests of 2, 4, 8 ... ms
    assert loop.ask("one", 5000, pause=0.002) <= 11 * 52  # ten seconds
    assert LONGEST_REST_SECONDS >= 1


def test_a_hiccup_of_a_quick_caller_costs_a_short_rest_only() -> None:
    loop = Turns()
    loop.ask("one", ALIKE)
    for _ in range(50):
        assert loop.ask("one", 500, pause=20 * MICRO) >= 390 * 20
        loop.ask("one", 1, pause=100 * MICRO)


def test_two_callers_by_turns_are_never_polled_for() -> None:
    loop = Turns()
    for _ in range(100):
        assert loop.ask("one", 1, pause=10 * MICRO) == 0
        assert loop.ask("two", 1, pause=10 * MICRO) == 0


def test_several_requests_in_a_chunk_are_no_lone_caller() -> None:
    loop = Turns()
    for _ in range(100):
        assert loop.ask("one", ALIKE - 1, pause=10 * MICRO) == 0
        assert loop.ask("one", 1, requests=2, pause=10 * MICRO) == 0


def test_polling_ends_when_somebody_else_comes() -> None:
    loop = Turns()
    loop.ask("one", ALIKE + 1, pause=10 * MICRO)
    assert loop.poll.is_polling
    loop.poll.answered("two", 1)
    assert loop.turn() == 1
    assert not loop.poll.is_polling


def test_after_a_rest_it_is_tried_again() -> None:
    loop = Turns()
    loop.ask("one", ALIKE)
    loop.ask("one", 1, pause=100 * MICRO)
    assert loop.ask("one", 10, pause=20 * MICRO) == 0
    loop.now += FIRST_REST_SECONDS
    assert loop.ask("one", 10, pause=20 * MICRO) == 200
