"""The compiled twins do what their twins in Python do, or leave it to them.

Random inputs come from a seed that Hypothesis chooses. `python -m tests.support.compiled_fuzz SECONDS` runs the same
checks for as long as one likes; docs/how-to/compiled.md says how to do that under AddressSanitizer.
"""

from __future__ import annotations

from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_run_leaves_the_same_files(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_files(random, root)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused_and_change_nothing(random: Random) -> None:
    checks.refuses_nonsense(random)
