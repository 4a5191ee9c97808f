"""The compiled check of a store says what its twin in Python says: of stores in order, in use, killed and damaged."""

from __future__ import annotations

from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_check_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=30, deadline=None)
def test_both_find_the_same(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_report(random, root)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_what_is_damaged_or_nonsense_is_refused_and_changes_nothing(random: Random) -> None:
    checks.refuses_nonsense_about_a_check(random)
