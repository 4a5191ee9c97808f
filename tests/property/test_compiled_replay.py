"""The compiled replay of the log does what a walk in Python does: after a crash, on a slave, and with damaged bytes."""

from __future__ import annotations

from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_replay_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=15, deadline=None)
def test_recovery_leaves_the_same_files_and_says_the_same(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_recovery(random, root)


@given(random=SEEDS)
@settings(max_examples=15, deadline=None)
def test_slaves_have_the_same_files_and_tell_the_same(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_slaves(random, root)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_what_is_damaged_or_nonsense_is_refused_and_changes_nothing(random: Random) -> None:
    checks.refuses_nonsense_about_a_replay(random)
