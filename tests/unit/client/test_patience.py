"""How long `adaptive` waits for a broker: learned from its answers, bounded by a budget; and what always holds."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.client.producer.fault import Attempt, Outcome, QueueChooser, strategy
from downrange.client.producer.fault.adaptive import FIRST_BUDGET, Adaptive, AdaptiveState
from downrange.client.producer.fault.patience import NOTHING_KNOWN, Answers, patience_millis
from downrange.client.producer.retry import LEAST_SHARE_SECONDS, attempt_timeout
from downrange.model.message import MessageQueue

ADAPTIVE = Adaptive()
SETTINGS = ADAPTIVE.settings
BROKERS = ("a", "b", "c", "d")
QUEUES = tuple(MessageQueue("orders", broker, 0) for broker in BROKERS)
latencies = st.floats(0.01, 5000)


def known(*millis: float) -> Answers:
    answers = NOTHING_KNOWN
    for one in millis:
        answers = answers.after(one)
    return answers


def after(*attempts: Attempt) -> AdaptiveState:
    state, now = ADAPTIVE.initial(), 0.0
    for attempt in attempts:
        now += attempt.latency_millis
        state = ADAPTIVE.learn(state, now, attempt)
    return state


def well(answers: int = 50, millis: float = 2.0) -> AdaptiveState:
    return after(*(Attempt(broker, millis, Outcome.OK) for _ in range(answers) for broker in BROKERS))


# --- what is learned --------------------------------------------------------------------------------------------------


@given(st.lists(latencies, min_size=1))
def test_the_high_water_mark_lies_between_the_last_answer_and_the_slowest(millis: list[float]) -> None:
    answers = known(*millis)
    assert answers.number == len(millis)
    assert millis[-1] <= answers.high_millis <= max(millis)


@given(st.lists(latencies, min_size=1, max_size=50), latencies)
def test_a_slow_answer_makes_patience_longer_and_never_shorter(millis: list[float], slow: float) -> None:
    def patience(answers: Answers) -> float:
        return patience_millis(answers, 4, 1e-9, 1e-9)  # without the part that shrinks with the number of answers

    before, slowed = known(*millis), known(*millis).after(slow)
    assert patience(slowed) >= patience(Answers(slowed.number, before.high_millis * 0.99)) * (1 - 1e-6)
    assert patience_millis(slowed, 4, 8, 50) >= 4 * slow


@given(st.lists(latencies, max_size=50))
def test_patience_is_wider_the_less_is_known_and_never_below_its_floor(millis: list[float]) -> None:
    answers = known(*millis)
    young = Answers(1, answers.high_millis)
    assert patience_millis(young, 4, 8, 50) >= patience_millis(answers, 4, 8, 50) >= 50


@given(latencies, st.integers(1, 40), st.integers(1, 40))
def test_answers_told_in_bundles_count_as_if_told_one_by_one(millis: float, first: int, second: int) -> None:
    bundled = NOTHING_KNOWN.after(millis, first).after(0.0, second)
    one_by_one = known(*[millis] * first, *[0.0] * second)
    assert bundled.number == one_by_one.number
    assert bundled.high_millis == pytest.approx(one_by_one.high_millis)


def test_a_broker_that_answers_in_two_milliseconds_is_given_fifty() -> None:
    assert ADAPTIVE.patience_millis(well(), "a") == 50


def test_a_broker_that_takes_its_time_is_given_it() -> None:
    assert ADAPTIVE.patience_millis(well(400, millis=100), "a") == pytest.approx(400, rel=0.05)


def test_nobody_is_hurried_who_is_not_known_or_whose_turn_is_a_last_resort() -> None:
    assert ADAPTIVE.patience_millis(well(), "new") == inf
    assert ADAPTIVE.patience_millis(ADAPTIVE.initial(), "a") == inf
    failed = ADAPTIVE.learn(well(), 1e6, Attempt("a", 5, Outcome.CONNECT_FAILED))
    assert ADAPTIVE.patience_millis(failed, "a") == inf


# --- what follows from giving up --------------------------------------------------------------------------------------


def test_a_broker_that_was_given_up_is_avoided_and_given_longer_the_next_time() -> None:
    state = ADAPTIVE.learn(well(), 1e6, Attempt("a", 50, Outcome.GIVEN_UP))
    assert state.avoided == {"a"}
    state = ADAPTIVE.probed(state, 1.001e6, "a", True, 1)
    state = ADAPTIVE.learn(state, 1.002e6, Attempt("a", 2, Outcome.OK))
    assert state.avoided == frozenset()
    patience = ADAPTIVE.patience_millis(state, "a")
    assert patience is not None
    assert patience > 190


def test_when_half_are_avoided_the_others_are_not_given_up() -> None:
    """When most are slow, the load is the cause, and sending everything twice makes it worse."""
    state = well(400)
    for broker in "ab":
        state = ADAPTIVE.learn(state, 1e6, Attempt(broker, 50, Outcome.GIVEN_UP))
    assert state.avoided == {"a", "b"}
    assert ADAPTIVE.patience_millis(state, "c") == inf
    # One that was on its way already: it counts as a slow answer.
    state = ADAPTIVE.learn(state, 1e6 + 1, Attempt("c", 50, Outcome.GIVEN_UP))
    assert state.avoided == {"a", "b"}
    assert state.brokers["c"].answers.high_millis >= 50


events = st.lists(
    st.tuples(st.sampled_from(BROKERS), latencies, st.sampled_from(Outcome), st.integers(1, 300)), max_size=80
)


@given(events)
def test_no_more_is_given_up_than_the_budget_allows(history: list[tuple[str, float, Outcome, int]]) -> None:
    """A producer with one send at a time that gives up whenever it may, whatever the brokers do."""
    state, now, answers, given_up = ADAPTIVE.initial(), 0.0, 0, 0
    for broker, millis, outcome, times in history:
        now += millis
        if outcome is Outcome.GIVEN_UP:
            if ADAPTIVE.patience_millis(state, broker) == inf:
                continue
            given_up += 1
            times = 1
        elif outcome in (Outcome.OK, Outcome.NOT_STORE_OK, Outcome.REFUSED):
            answers += times
        else:
            times = 1
        state = ADAPTIVE.learn(state, now, Attempt(broker, millis, outcome, times))
    assert given_up <= FIRST_BUDGET + SETTINGS.give_up_part * answers
    assert -1 <= state.budget <= SETTINGS.most_give_ups + 300 * SETTINGS.give_up_part


def test_attempts_on_their_way_may_overdraw_the_budget_and_it_is_paid_back_first() -> None:
    state = well(400)
    for _ in range(30):
        state = ADAPTIVE.learn(state, 1e6, Attempt("a", 50, Outcome.GIVEN_UP))
    assert state.budget < -10
    assert ADAPTIVE.patience_millis(state, "b") == inf
    debt = 1 - state.budget
    state = ADAPTIVE.learn(state, 2e6, Attempt("b", 2, Outcome.OK, int(debt / SETTINGS.give_up_part) + 1))
    assert ADAPTIVE.patience_millis(state, "b") == 50


# --- the time of an attempt -------------------------------------------------------------------------------------------

seconds = st.floats(0.001, 30)


@given(left=seconds, per_attempt=st.none() | seconds, patience=st.none() | seconds, attempts=st.integers(1, 20))
def test_an_attempt_never_takes_longer_than_there_is_time_and_the_last_one_may_take_all(
    left: float, per_attempt: float | None, patience: float | None, attempts: int
) -> None:
    limit = attempt_timeout(0, left, per_attempt, patience, attempts)
    rocketmqs = attempt_timeout(0, left, per_attempt)
    assert 0 < limit <= rocketmqs <= left
    if patience is None or attempts == 1:
        assert limit == rocketmqs
    else:
        assert limit <= patience
        assert limit <= max(left / min(attempts, 3), LEAST_SHARE_SECONDS)


# --- the chooser ------------------------------------------------------------------------------------------------------


@given(events)
def test_while_all_is_calm_bundles_change_no_choice(history: list[tuple[str, float, Outcome, int]]) -> None:
    """Told in bundles or one by one: the same brokers are avoided, and each gets as much patience or a little more."""
    bundled, exact = QueueChooser(strategy("adaptive")), QueueChooser(strategy("adaptive"))
    now = 0.0
    for broker, millis, outcome, times in history:
        for _ in range(times % 20 + 1):
            now += millis
            bundled.attempt_ended(now, broker, millis, outcome)
            exact.learn(now, Attempt(broker, millis, outcome))
            assert bundled.state.avoided == exact.state.avoided
    if exact.strategy.calm_millis(exact.state, now):
        assert [bundled.choose(QUEUES, now).broker_name in BROKERS for _ in range(4)] == [True] * 4


def test_every_answer_of_a_broker_that_is_hardly_known_is_told() -> None:
    chooser = QueueChooser(strategy("adaptive"))
    for number in range(1, 4):
        chooser.attempt_ended(number, "a", 1.0, Outcome.OK)
        assert chooser.state.brokers["a"].answers.number >= (number + 1) // 2
    for number in range(100):
        chooser.attempt_ended(10 + number, "a", 1.0, Outcome.OK)
    assert chooser.state.brokers["a"].answers.number > 80
