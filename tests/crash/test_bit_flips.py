"""One flipped bit anywhere: the store opens or says why not, serves no wrong body, and `check` knows about it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.bit_flips import KINDS, survive_flip
from tests.support.damage import CrashedStore


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plug_pulled", [True, False], ids=["power-cut", "killed"])
def test_a_flipped_bit_is_repaired_cut_or_reported(kind: str, plug_pulled: bool, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    crashed = CrashedStore(tmp_path / "store", tmp_path, plug_pulled=plug_pulled)
    outcomes = [survive_flip(crashed, kind, chance) for _ in range(20 if kind in ("checkpoint", "config") else 40)]
    assert set(outcomes) <= {"refused", "reported", "cut", "repaired"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plug_pulled", [True, False], ids=["power-cut", "killed"])
def test_many_flipped_bits(kind: str, plug_pulled: bool, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    crashed = CrashedStore(tmp_path / "store", tmp_path, plug_pulled=plug_pulled)
    for _ in range(500):
        survive_flip(crashed, kind, chance)
