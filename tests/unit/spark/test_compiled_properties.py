"""What C makes of records and properties is what Python makes of them. More rounds: tests/support/compiled_fuzz.py."""

from __future__ import annotations

from random import Random

import pytest

from downrange.compiled import VARIANT
from tests.support.compiled_property_checks import (
    refuses_nonsense_about_properties,
    same_heads,
    same_properties,
    same_walk,
)

pytestmark = pytest.mark.skipif(VARIANT != "compiled", reason="nothing was compiled")


@pytest.mark.parametrize("seed", range(20))
def test_properties_are_split_alike(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        same_properties(random)


@pytest.mark.parametrize("seed", range(5))
def test_records_are_walked_alike(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        same_walk(random)


@pytest.mark.parametrize("seed", range(5))
def test_heads_of_records_are_read_alike(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        same_heads(random)


def test_arguments_that_only_a_bug_can_pass_are_refused() -> None:
    random = Random(1)
    for _ in range(500):
        refuses_nonsense_about_properties(random)


def test_nothing_is_kept_of_what_was_split() -> None:
    import tracemalloc

    def rounds() -> None:
        random = Random(2)
        for _ in range(300):
            same_properties(random)
            same_heads(random)
            refuses_nonsense_about_properties(random)

    rounds()
    tracemalloc.start()
    try:
        rounds()
        before = tracemalloc.get_traced_memory()[0]
        rounds()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
