"""Which question comes next, on a clock that moves by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.console.schedule import LONGEST_REST, Budget, Kind, Pace, Question, Tier, Wanted, due

PACE = Pace()


def wanted(*names: str, tier: Tier = Tier.OTHER, kind: Kind = Kind.GROUP) -> list[Wanted]:
    return [Wanted(Question(kind, name), tier) for name in names]


def test_what_was_never_asked_comes_first_by_kind() -> None:
    questions = [*wanted("t", kind=Kind.TOPIC), *wanted("g"), Wanted(Question(Kind.RUNTIME), Tier.OTHER)]
    found, wait = due(questions, {}, PACE, 0)
    assert [one.kind for one in found] == [Kind.RUNTIME, Kind.GROUP, Kind.TOPIC]
    assert wait == 0


def test_nothing_is_asked_before_its_time() -> None:
    question = Question(Kind.GROUP, "billing")
    found, wait = due([Wanted(question, Tier.BEHIND)], {question: 100.0}, PACE, 107.0)
    assert (found, wait) == ([], 3.0)
    assert due([Wanted(question, Tier.BEHIND)], {question: 100.0}, PACE, 110.0)[0] == [question]


def test_what_somebody_begins_to_look_at_goes_before_what_is_overdue() -> None:
    seen, other = Question(Kind.GROUP, "seen"), Question(Kind.GROUP, "other")
    asked = {seen: 60.0, other: 0.0}
    assert due([Wanted(other, Tier.OTHER), Wanted(seen, Tier.SEEN)], asked, PACE, 100.0)[0] == [seen, other]


def test_no_second_has_more_than_a_hundred_questions() -> None:
    found, _ = due(wanted(*(f"g{number}" for number in range(1_000))), {}, PACE, 0)
    assert len(found) == 100


def test_a_broker_is_asked_for_its_figures_before_all_others() -> None:
    runtime, group = Question(Kind.RUNTIME), Question(Kind.GROUP, "late")
    asked = {runtime: 95.0, group: 0.0}
    assert due([*wanted("late"), Wanted(runtime, Tier.OTHER)], asked, PACE, 100.0)[0] == [runtime, group]


@given(costs=st.lists(st.tuples(st.floats(0.0001, 0.04), st.floats(0, 0.04)), min_size=1, max_size=200))
def test_questions_take_one_per_cent_of_a_broker(costs: list[tuple[float, float]]) -> None:
    """Whatever single answers cost: at the time of the next question all the time before is paid for."""
    budget, now = Budget(PACE), 1000.0
    for took, computed in costs:
        now += took
        budget.charge(now, took, computed)
        rest = budget.rest(now)
        assert 1 / PACE.most_per_second <= rest <= LONGEST_REST
        now += rest
    assert budget.charged <= PACE.share * (now - 1000.0) + 1e-9


def test_what_the_console_computes_itself_is_not_the_time_of_the_broker() -> None:
    budget = Budget(PACE)
    budget.charge(10.0, 0.003, 0.002)
    assert budget.charged == pytest.approx(0.001)
    budget.charge(20.0, 0.004, 0.004)
    assert budget.charged == pytest.approx(0.002), "a quarter at least: it may have worked while we did"


def test_a_large_answer_is_paid_for_by_the_questions_that_follow() -> None:
    budget = Budget(PACE)
    budget.charge(0.0, 0.2, 0.0)
    assert budget.rest(0.0) == LONGEST_REST
    assert budget.rest(LONGEST_REST) == LONGEST_REST, "fifteen seconds are left"
    assert budget.rest(19.0) == pytest.approx(1.0)


def test_a_page_that_is_opened_does_not_wait_for_a_small_debt() -> None:
    budget = Budget(PACE)
    budget.charge(0.0, 0.04, 0.0)
    assert budget.rest(0.0) == pytest.approx(4.0)
    assert budget.rest(0.0, is_nudged=True) == pytest.approx(0.01)
    budget.charge(0.0, 0.2, 0.0)
    assert budget.rest(0.0, is_nudged=True) == LONGEST_REST


def test_where_the_budget_is_short_all_intervals_grow_alike() -> None:
    """Ten questions a second, though what is seen, behind and the others ask for more."""
    tiers = {Tier.SEEN: 40, Tier.BEHIND: 60, Tier.OTHER: 300}
    questions = [w for tier, count in tiers.items() for w in wanted(*(f"{tier}{n}" for n in range(count)), tier=tier)]
    asked: dict[Question, float] = {one.question: 0.0 for one in questions}
    counts = dict.fromkeys(tiers, 0)
    tier_of = dict(questions)
    for second in range(600):
        for question in due(questions, asked, PACE, float(second))[0][:10]:
            asked[question] = float(second)
            counts[tier_of[question]] += 1
    often = [counts[tier] / tiers[tier] * PACE.interval(Kind.GROUP, tier) for tier in tiers]
    assert max(often) < 1.3 * min(often)


def test_every_question_has_its_turn() -> None:
    """A thousand groups that nobody looks at are asked once a minute, beside one that somebody does."""
    pace = PACE
    seen = Question(Kind.GROUP, "seen")
    questions = [Wanted(seen, Tier.SEEN), *wanted(*(f"g{number}" for number in range(1_000)))]
    asked: dict[Question, float] = {}
    counts: dict[Question, int] = {}
    for second in range(180):
        for question in due(questions, asked, pace, float(second))[0]:
            asked[question] = float(second)
            counts[question] = counts.get(question, 0) + 1
    assert len(counts) == 1_001
    assert min(counts.values()) >= 2
    assert counts[seen] >= 34
