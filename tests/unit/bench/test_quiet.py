"""The same conditions for every load, by rules that do not look at what it found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate, count
from pathlib import Path

import pytest

from bench import quiet


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(
    ("others", "kept", "runs"),
    [
        ([0.05], 1, 1),
        ([0.3, 0.0], 2, 2),
        ([0.3, 0.9, 0.5], 1, 3),
        ([0.9, 0.5, 0.3], 3, 3),
    ],
)
def test_a_load_is_repeated_while_others_are_busy_and_the_least_disturbed_is_kept(
    monkeypatch: pytest.MonkeyPatch, others: list[float], kept: int, runs: int
) -> None:
    """Each load takes a second, of which others use so much."""
    # Read before and after each load.
    seconds = iter([reading for total in accumulate(others, initial=0.0) for reading in (total, total)][1:])
    clock = iter(range(100))
    monkeypatch.setattr(quiet, "_others_seconds", lambda: next(seconds))
    monkeypatch.setattr("bench.quiet.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(quiet, "settle", lambda: None)
    monkeypatch.setattr(quiet, "touch_memory", lambda size: None)
    monkeypatch.setattr(quiet, "ATTEMPTS", 3)
    monkeypatch.setattr(quiet, "_repeats", count(1))
    found = iter(range(1, 10))
    assert quiet.undisturbed(lambda: next(found)) == kept
    assert next(found) == runs + 1


def test_user_time_of_others_does_not_count_ours() -> None:
    def worked() -> int:
        before, _ = quiet._family_ticks()
        subprocess.run([sys.executable, "-c", "pass"], check=True)  # has ended, so it is not counted any more
        deadline = os.times().user + 0.1
        while os.times().user < deadline:
            pass
        return quiet._family_ticks()[0] - before

    # Processes of other tests may end meanwhile, and are not counted any more.
    assert any(worked() >= 9 for _ in range(10))  # hundredths of a second


def test_a_load_waits_until_the_servers_have_nothing_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use a core, then half of one, then hardly any. Each time is looked at twice."""
    used = iter([(0, 0), (20, 10), (30, 0), (40, 5), (45, 10), (46, 10)])
    waited: list[float] = []
    synced: list[int] = []
    monkeypatch.setattr(quiet, "_family_ticks", lambda: next(used))
    monkeypatch.setattr(quiet, "_TICK", 100)
    monkeypatch.setattr("bench.quiet.sleep", waited.append)
    monkeypatch.setattr("bench.quiet.os.sync", lambda: synced.append(1))
    quiet.settle()
    assert waited == [quiet.IDLE_SECONDS] * 3
    assert len(synced) == 3


def test_a_load_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    used = count(0, 100)
    clock = count(0)
    monkeypatch.setattr(quiet, "_family_ticks", lambda: (next(used), 0))
    monkeypatch.setattr("bench.quiet.monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("bench.quiet.sleep", lambda seconds: None)
    monkeypatch.setattr("bench.quiet.os.sync", lambda: None)
    quiet.settle()
    assert next(clock) > quiet.LONGEST_WAIT_SECONDS


def test_touched_memory_leaves_no_file_behind(tmp_path: Path) -> None:
    quiet.touch_memory(1 << 20, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core there is nothing to keep apart")
def test_generator_and_server_have_a_core_each_and_get_the_others_back(sleeper: int) -> None:
    cores = os.sched_getaffinity(0)
    with quiet.cores_apart(sleeper):
        own, theirs = os.sched_getaffinity(0), os.sched_getaffinity(sleeper)
        assert len(own) == 1
        assert own | theirs == cores
        assert not own & theirs
    assert os.sched_getaffinity(0) == os.sched_getaffinity(sleeper) == cores


def test_they_share_a_core_when_asked_to(sleeper: int) -> None:
    cores = os.sched_getaffinity(0)
    with quiet.core_shared(sleeper):
        assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getaffinity(0) == os.sched_getaffinity(sleeper)
    assert os.sched_getaffinity(0) == os.sched_getaffinity(sleeper) == cores
