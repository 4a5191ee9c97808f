"""The load generator's compiled reader of replies does what its twin in Python does.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_load_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_replies_answer_the_same_requests(random: Random) -> None:
    checks.same_replies_read(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_an_exception(random: Random) -> None:
    checks.refuses_nonsense_about_replies(random)
