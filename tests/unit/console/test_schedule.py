"""Which question comes next, on a clock that moves by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.console.schedule import LONGEST_REST, Kind, Pace, Question, Tier, Wanted, due

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


def test_what_is_looked_at_goes_before_what_is_overdue() -> None:
    seen, other = Question(Kind.GROUP, "seen"), Question(Kind.GROUP, "other")
    asked = {seen: 94.0, other: 0.0}
    assert due([Wanted(other, Tier.OTHER), Wanted(seen, Tier.SEEN)], asked, PACE, 100.0)[0] == [seen, other]


def test_no_second_has_more_than_a_hundred_questions() -> None:
    found, _ = due(wanted(*(f"g{number}" for number in range(1_000))), {}, PACE, 0)
    assert len(found) == 100


@given(took=st.floats(0, 60))
def test_a_broker_is_left_alone_for_most_of_the_time(took: float) -> None:
    rest = PACE.rest(took, is_first_round=False)
    assert rest >= 1 / PACE.most_per_second
    assert rest <= LONGEST_REST
    if rest < LONGEST_REST:
        assert took <= PACE.share * (took + rest) + 1e-9


def test_the_first_round_is_quick() -> None:
    assert PACE.rest(0.5, is_first_round=True) == pytest.approx(0.01)


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
