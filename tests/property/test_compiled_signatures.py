"""The compiled check of signatures lets exactly those requests pass that Python would.

`python -m tests.support.compiled_fuzz SECONDS` runs these checks for as long as one likes.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps

if steps is None:
    pytest.skip("built without a compiler, or DOWNRANGE_PURE is set", allow_module_level=True)

from tests.support import compiled_signature_checks as checks
from tests.support.leaks import check_no_leaks

SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_the_same_requests_pass(random: Random) -> None:
    checks.same_signatures(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_any_secret_and_any_body_give_the_right_signature(random: Random) -> None:
    checks.same_states(random)


@given(random=SEEDS)
@settings(max_examples=50, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_signatures(random)


def test_nothing_leaks() -> None:
    check_no_leaks(lambda: checks.same_signatures(Random(5)), [])
