"""The compiled steps of timer messages do what their twins in Python do.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps

if steps is None:
    pytest.skip("built without a compiler, or DOWNRANGE_PURE is set", allow_module_level=True)
from tests.support import compiled_timer_checks as checks

SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=20, deadline=None)
def test_messages_that_are_due_are_delivered_alike(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_deliveries(random, root)


@given(random=SEEDS)
@settings(max_examples=20, deadline=None)
def test_messages_are_taken_into_the_index_alike(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_intake(random, root)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_chains_are_followed_alike(random: Random) -> None:
    checks.same_chains(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_what_is_damaged_or_nonsense_is_refused(random: Random) -> None:
    checks.refuses_nonsense_about_timers(random)
