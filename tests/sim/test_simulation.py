"""Seeds of the simulation, that a seed repeats itself, and that the simulation finds what is planted."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from itertools import count
from pathlib import Path

import pytest

from downrange.broker.queue_locks import QueueLocks
from downrange.broker.services.delay import DelayLevel
from downrange.client.consumer.allocation import Averagely
from downrange.spark import planner
from downrange.store.config import FlushDiskType
from tests.sim.cluster import draw_shape
from tests.sim.disk import Disk
from tests.sim.faults import Fault
from tests.sim.main import seeds_of
from tests.sim.run import Outcome, run

SEEDS = "1-200"
ROOT = Path(__file__).parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(3600)
def test_every_seed_passes() -> None:
    ended = simulate(SEEDS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith(" seeds passed\n")


def test_a_seed_repeats_itself_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    seed = str(seed_with("has_pipeline", "has_poppers", "has_timers"))
    first = simulate(seed, "--history").stdout
    monkeypatch.delenv("PYTHONHASHSEED")
    second = simulate(seed, "--history").stdout
    assert first.count("\n") > 100
    assert first == second


@pytest.mark.parametrize("wrong", ["", "x", "3-", "-3", "5-4", "1,2"])
def test_seeds_that_are_no_numbers_are_refused(wrong: str) -> None:
    with pytest.raises(ArgumentTypeError, match="expected one number or a range, as 7 or 1-200"):
        seeds_of(wrong)


def test_one_number_and_a_range_are_seeds() -> None:
    assert list(seeds_of("7")) == [7]
    assert list(seeds_of("7-9")) == [7, 8, 9]


def test_a_disk_that_forgets_what_was_synced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "synced", lambda self, descriptor: None)
    seeds = [seed for seed in range(100) if draw_shape(seed).flush_disk_type is FlushDiskType.SYNC_FLUSH]
    cut = Fault(30.0, "power cut", "a", seconds=2.0)
    assert "lost" in rules_broken(run(seeds[0], [cut]))


def test_two_consumers_at_one_queue_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueueLocks, "lock", lambda self, group, client_id, queues, now: list(queues))
    monkeypatch.setattr(Averagely, "share", lambda self, client_id, queues, client_ids: list(queues))
    assert "overlap" in rules_broken(run(1, []))


def test_a_delayed_message_that_comes_at_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayLevel, "is_due", lambda self, due_millis, now: True)
    assert "early" in rules_broken(run(1, []))


def test_a_pipeline_that_reads_a_batch_from_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = planner.ranges
    monkeypatch.setattr(
        planner, "ranges", lambda start, end: [one._replace(start=max(0, one.start - 1)) for one in right(start, end)]
    )
    assert "twice" in rules_broken(run(seed_with("has_pipeline"), []))


def seed_with(*parts: str) -> int:
    return next(seed for seed in count(1) if all(getattr(draw_shape(seed), part) for part in parts))


def rules_broken(outcome: Outcome) -> set[str]:
    return {problem.partition(":")[0] for problem in outcome.problems}


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_seeds() -> None:
    ended = simulate(os.environ.get("SEEDS", "1-2000"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
