"""The compiled ways to pick entries pick what the ones in Python do, or leave it to them.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_pick_checks as checks
from tests.support.leaks import check_no_leaks, is_type_error

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_the_same_first_entries_are_picked(random: Random) -> None:
    checks.same_pick_of_all(random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_the_same_entries_are_picked_by_tag(random: Random) -> None:
    checks.same_pick_by_tags(random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_the_same_entries_are_picked_by_properties(random: Random) -> None:
    checks.same_pick_by_properties(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_a_pick(random)


@pytest.mark.parametrize(("error", "outcome"), [(ValueError, (b"", 1, 0)), (RecursionError, None), (KeyError, None)])
def test_a_condition_that_raises_says_no_or_is_left_to_the_twin(error: type[Exception], outcome: object) -> None:
    found = checks.recorded(Random(3), spoilt=False)
    first = found[0][:20], *found[1:]
    asked = []

    def condition(find: Any) -> bool:
        asked.append(find("a"))
        raise error("no")

    taken: Any = steps
    assert taken.pick_by_properties(first, 5, 1000, (("a", b"a"),), condition) == outcome
    assert len(asked) == 1


def test_memory_that_ran_out_is_an_error() -> None:
    found = checks.recorded(Random(3), spoilt=False)

    def condition(find: Any) -> bool:
        raise MemoryError

    taken: Any = steps
    with pytest.raises(MemoryError):
        taken.pick_by_properties(found, 5, 1000, (("a", b"a"),), condition)


def test_no_reference_is_kept_or_lost() -> None:
    taken: Any = steps
    entries, view, *numbers = checks.recorded(Random(5), spoilt=False)
    log = bytearray(view)
    found = entries, log, *numbers
    name = "color"
    names = ((name, b"color"),)
    answers = [True, None, False]

    def condition(find: Any) -> bool | None:
        find(name)
        answers.append(answers.pop(0))
        return answers[0]

    watched: list[Any] = [entries, log, found, name, names, condition, None, True]

    def once() -> None:
        assert taken.pick_by_properties(found, 1000, 10**6, names, condition) is not None
        assert taken.pick_by_properties((entries, log, 10**9, len(log)), 1000, 10**6, names, condition) is None
        assert taken.pick_by_properties(found, 1000, 10**6, names * 17, condition) is None
        assert is_type_error(taken.pick_by_properties, (entries, log[:-1], *numbers), 9, 1, names, condition)
        assert is_type_error(taken.pick_by_properties, found, 1000, 1, (("x", 1),), condition)
        assert taken.pick_by_tags(found, 1000, 10**6, bytes(4)) is not None
        assert taken.pick_by_tags((entries * 2, log, *numbers), 1000, 10**6, bytes(4)) is None
        assert taken.pick_all(found, 1000, 10**6) is not None
        assert taken.pick_all((entries * 2, log, *numbers), 1000, 10**6) is None
        assert is_type_error(taken.pick_all, entries, 1, 1)
        assert is_type_error(taken.pick_by_tags, found, 0, 1, b"")

    check_no_leaks(once, watched)
    log += b"it can grow: nobody holds a view of it"
