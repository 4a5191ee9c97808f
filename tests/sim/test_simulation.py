"""Seeds of the simulation, that a seed repeats itself, and that the simulation finds what is planted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from downrange.broker.queue_locks import QueueLocks
from downrange.store.config import FlushDiskType
from tests.sim.cluster import draw_shape
from tests.sim.disk import Disk
from tests.sim.faults import Fault
from tests.sim.main import seeds_of
from tests.sim.run import run

SEEDS = "1-60"
ROOT = Path(__file__).parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_every_seed_passes() -> None:
    ended = simulate(SEEDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(" seeds passed\n")


def test_a_seed_repeats_itself_to_the_byte() -> None:
    first, second = (simulate("22", "--history").stdout for _ in range(2))
    assert first.count("\n") > 100
    assert first == second


@pytest.mark.parametrize("wrong", ["", "x", "3-", "-3", "5-4", "1,2"])
def test_seeds_that_are_no_numbers_are_refused(wrong: str) -> None:
    ended = simulate("--", wrong)
    assert ended.returncode == 2
    assert "expected one number or a range, as 7 or 1-200" in ended.stderr


def test_one_number_and_a_range_are_seeds() -> None:
    assert list(seeds_of("7")) == [7]
    assert list(seeds_of("7-9")) == [7, 8, 9]


def test_a_disk_that_forgets_what_was_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "synced", lambda self, descriptor: None)
    seeds = [seed for seed in range(100) if draw_shape(seed).flush_disk_type is FlushDiskType.SYNC_FLUSH]
    cut = Fault(30.0, "power cut", "a", seconds=2.0)
    outcome = run(seeds[0], [cut])
    assert any(problem.startswith("lost: ") for problem in outcome.problems), outcome.problems


def test_a_broker_that_forgets_locks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueLocks, "prepare_save", lambda self: None)
    found = set()
    for seed in range(1, 30):
        outcome = run(seed, [Fault(at, "kill", "a", seconds=0.3) for at in (15.0, 30.0, 45.0)])
        found |= {problem.partition(":")[0] for problem in outcome.problems}
        if "overlap" in found:
            return
    pytest.fail(f"no overlap, only {found}")


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_seeds() -> None:
    ended = simulate(os.environ.get("SEEDS", "1-2000"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
