"""The compiled reply to a pull has the bytes of the one made in Python, or is left to it.

`python -m tests.support.compiled_fuzz SECONDS` runs the same checks for as long as one likes.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.compiled import steps
from tests.support import compiled_pull_checks as checks
from tests.support.leaks import check_no_leaks, is_type_error

pytestmark = pytest.mark.skipif(steps is None, reason="built without a compiler, or DOWNRANGE_PURE is set")
SEEDS = st.integers(0, 2**64).map(Random)


@given(random=SEEDS)
@settings(max_examples=400, deadline=None)
def test_a_reply_has_the_same_bytes(random: Random) -> None:
    checks.same_pull_reply(random)


@given(random=SEEDS)
@settings(max_examples=200, deadline=None)
def test_arguments_that_only_a_bug_can_pass_are_refused(random: Random) -> None:
    checks.refuses_nonsense_about_a_pull(random)


@pytest.mark.parametrize(
    "spoilt",
    [
        {0: (b"x",)},
        {1: 2},
        {2: 2**31},
        {3: (1, 2, 3)},
        {3: (1, 2, 3, 2**63)},
        {4: None},
        {4: (b"", bytearray(9), 0, 9)},
        {4: (bytes(19), bytearray(9), 0, 9)},
        {4: (bytes(20), bytearray(9), 0, 10)},
        {4: (bytes(20), "no buffer", 0, 0)},
        {5: -1},
    ],
)
def test_wrong_arguments_are_type_errors(spoilt: dict[int, object]) -> None:
    found = checks.backlog(Random(5), spoilt=False)
    arguments: list[Any] = [checks.REPLY.pieces[0], 0, 7, (0, 1, 2, 3), found, 100]
    for number, other in spoilt.items():
        arguments[number] = other
    taken: Any = steps
    with pytest.raises(TypeError):
        taken.encode_pull(*arguments)
    with pytest.raises(TypeError):
        taken.encode_pull(*arguments[:-1])


@pytest.mark.parametrize("kind", [0, 1])
def test_no_reference_is_kept_or_lost(kind: int) -> None:
    taken: Any = steps
    entries, _, start, readable = checks.backlog(Random(5), spoilt=False)
    log = bytearray(readable)
    pieces = checks.REPLY.pieces[kind]
    found = entries, log, start, readable
    cut = entries, log, start, readable - 1
    size = checks.bytes_of(found)  # type: ignore[arg-type]
    numbers = 10**6, 10**7, 10**8, 10**9
    watched: list[Any] = [entries, log, pieces, pieces[0], found, numbers, numbers[0], start, None]

    def once() -> None:
        assert taken.encode_pull(pieces, kind, 10**6, numbers, found, size) is not None
        assert taken.encode_pull(pieces, kind, 10**6, numbers, cut, size) is None
        for wrong in ("no buffer", start, readable), (log, start, readable + 1):
            assert is_type_error(taken.encode_pull, pieces, kind, 10**6, numbers, (entries, *wrong), size)

    check_no_leaks(once, watched)
    log += b"it can grow: nobody holds a view of it"
