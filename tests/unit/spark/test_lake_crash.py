"""A process that dies between any two steps of a commit or a compaction: what readers see, before and after repair."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from downrange.spark.lake import files
from downrange.spark.lake import lake as lake_module
from downrange.spark.lake.check import problems
from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from tests.support.lake_messages import Place, by_glob, by_manifest, messages, places, write

FIRST = [messages(0, 10, queue_id=queue_id) for queue_id in range(3)]
SECOND = [messages(10, 20, queue_id=queue_id) for queue_id in range(3)]


class Died(BaseException):
    """kill -9, as far as the code can tell: nothing after it runs."""


class Steps:
    """Counts the steps that change the disk; dies before the one chosen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, die_before: int) -> None:
        self.taken = 0
        self._die_before = die_before
        for owner, name in ((os, "replace"), (os, "fsync"), (files, "remove"), (Path, "mkdir")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, step: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object, **options: object) -> object:
            if self.taken == self._die_before:
                raise Died
            self.taken += 1
            return step(*arguments, **options)

        return counted


def expected(*batches: pa.RecordBatch) -> Counter[Place]:
    return places(pa.Table.from_batches(batches))


def test_dying_anywhere_in_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "SNAPSHOT_ENTRIES", 2)  # the snapshot dies as well
    before, after = expected(*FIRST), expected(*FIRST, *SECOND)
    outcomes = set()
    for step in range(1000):
        lake = Lake.create(tmp_path / str(step))
        lake.commit_batch("query", 0, write(lake, *FIRST))
        written = write(lake, *SECOND)
        with monkeypatch.context() as patch:
            steps = Steps(patch, step)
            with contextlib.suppress(Died):
                lake.commit_batch("query", 1, written)
                lake.settle()
        manifest, glob = by_manifest(lake), by_glob(lake.root)
        assert manifest in (before, after), f"half a batch after {step} steps"
        assert before <= glob <= manifest, f"a message too many or lost after {step} steps"
        outcomes.add((manifest == after, glob == after))
        with lake.writing("archive"):
            assert by_glob(lake.root) == manifest
            lake.commit_batch("query", 1, write(lake, *SECOND))
        assert by_manifest(lake) == by_glob(lake.root) == after
        assert list(problems(lake)) == []
        if steps.taken < step:
            break
    assert outcomes == {(False, False), (True, False), (True, True)}
    assert step > 10


def test_dying_anywhere_in_a_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "SNAPSHOT_ENTRIES", 3)
    everything = expected(*FIRST, *SECOND)
    doubled = 0
    for step in range(1000):
        lake = Lake.create(tmp_path / str(step))
        lake.commit_batch("query", 0, write(lake, *FIRST))
        lake.commit_batch("query", 1, write(lake, *SECOND))
        with monkeypatch.context() as patch:
            steps = Steps(patch, step)
            with contextlib.suppress(Died):
                compact(lake)
        assert by_manifest(lake) == everything
        glob = by_glob(lake.root)
        if lake.contents().version == 3 and len(lake.contents().files) == 1 and glob != everything:
            doubled += glob.total() > everything.total()
        else:
            assert glob == everything, f"after {step} steps"
        with lake.writing("archive"):  # the archive repairs it too
            assert by_glob(lake.root) == by_manifest(lake) == everything
        compact(lake)
        assert len(lake.files()) == 1
        assert by_glob(lake.root) == by_manifest(lake) == everything
        assert list(problems(lake)) == []
        if steps.taken < step:
            break
    assert doubled > 0  # the moment that docs/reference/lake.md speaks of exists
    assert step > 10


def test_a_reader_while_files_are_replaced(tmp_path: Path) -> None:
    """The manifest's reader is right at every moment, also when it looked before the old files went."""
    lake = Lake.create(tmp_path / "lake")
    lake.commit_batch("query", 0, write(lake, *FIRST))
    lake.commit_batch("query", 1, write(lake, *SECOND))
    seen: list[Counter[Place]] = []
    compact(lake, on_file=lambda _: seen.append(by_manifest(Lake.open(lake.root))))
    assert seen == [expected(*FIRST, *SECOND)]
