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

from downrange.compiled import runs
from downrange.protocol.bodies.plain_send import parse_send_in_python
from tests.support import compiled_cases as cases
from tests.support import compiled_checks as checks

pytestmark = pytest.mark.skipif(runs is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_a_header_is_read_alike_or_left_alone(random: Random) -> None:
    whole = cases.frame(random)
    checks.same_header(whole)
    for _ in range(5):
        checks.same_header(cases.broken(random, whole))


def test_captured_sends_are_read_by_the_twin_however_they_are_cut() -> None:
    frames = list(cases.golden_sends())
    assert frames
    left = [frame for frame in frames if not checks.same_header(frame)]
    # Wrong on purpose, or signed by a Java client, which then writes every field of a binary header twice.
    assert len(left) < len(frames) / 10
    assert all(parse_send_in_python(frame) is None or b"Signature" in frame[1] for frame in left)
    for kind, header, body in frames[:20]:
        for end in range(len(header)):
            checks.same_header((kind, header[:end], body))
            checks.same_header((kind, header[end:], body))


@given(random=SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_run_leaves_the_same_files(random: Random) -> None:
    with TemporaryDirectory() as root:
        checks.same_files(random, root)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_replies_are_the_same_bytes(random: Random) -> None:
    checks.same_replies(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused_and_change_nothing(random: Random) -> None:
    checks.refuses_nonsense(random)
