"""The compiled twins of frames, plain runs and replies: as `test_compiled.py`, which has the rest."""

from __future__ import annotations

from random import Random

import pytest
from downrange.protocol.bodies.plain_send import parse_send
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from downrange.protocol.framing import Frame
from tests.support import compiled_cases as cases
from tests.support import compiled_send_checks as checks

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


def is_plain(frame: Frame) -> bool:
    """May this captured send be a plain one, by the twin in Python? Then its topic is known from here on."""
    sent = parse_send(frame)
    if sent is None or sent[2].startswith("%") or not sent[2] or len(frame[2]) > 300:
        return False
    checks.know_topic(sent[2])
    return checks.in_python(frame) is not None


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_a_send_is_taken_alike_or_left_alone(random: Random) -> None:
    whole = cases.send(random)
    checks.same_run(whole)
    for _ in range(5):
        checks.same_run(cases.broken(random, whole))
        checks.same_run(cases.broken_body(random, whole))


def test_the_twin_takes_most_of_what_is_usual() -> None:
    taken = [checks.same_run(cases.send(Random(seed), unusual=0)) for seed in range(300)]
    assert sum(taken) > 250


def test_captured_sends_are_taken_however_they_are_cut() -> None:
    frames = [frame for frame in cases.golden_sends() if is_plain(frame)]
    assert len(frames) > 100
    left = [frame for frame in frames if not checks.same_run(frame)]
    # A Java client that signs writes every field of a binary header twice.
    assert len(left) < len(frames) / 10
    assert all(b"Signature" in frame[1] for frame in left)
    for kind, header, body in frames[:20]:
        for end in range(len(header)):
            checks.same_run((kind, header[:end], body))
            checks.same_run((kind, header[end:], body))


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_frames_in_a_row_make_one_run(random: Random) -> None:
    checks.same_runs(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_a_chunk_is_cut_alike(random: Random) -> None:
    checks.same_frames(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_replies_are_the_same_bytes(random: Random) -> None:
    checks.same_replies(random)


@given(random=SEEDS)
@settings(max_examples=300, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_sends(random)
