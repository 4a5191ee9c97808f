"""Processes that die at any moment of a commit or a compaction: what readers see before and after the next one."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from downrange.spark.lake.check import problems
from downrange.spark.lake.compaction import compact
from downrange.spark.lake.layout import LakeError
from tests.support.lake_messages import commit, expected, found, messages
from tests.support.object_store import LakePlace
from tests.support.processes import Running

FIRST = [messages(0, 10, queue_id=queue_id) for queue_id in range(3)]
SECOND = [messages(10, 20, queue_id=queue_id) for queue_id in range(3)]


class Died(BaseException):
    """kill -9, as far as the code can tell: nothing after it runs."""


def around_commit(*, before: BaseException | None = None, after: BaseException | None = None) -> Callable[..., None]:
    """The library's commit, with an error in front of it or behind it; once."""
    commit = DeltaTable.create_write_transaction
    errors = [before, after]

    def wrapped(table: DeltaTable, *arguments: object, **options: object) -> None:
        first, last = errors
        errors[:] = None, None
        if first is not None:
            raise first
        commit(table, *arguments, **options)  # type: ignore[arg-type]
        if last is not None:
            raise last

    return wrapped


@pytest.mark.parametrize("is_made", [False, True])
def test_dying_around_a_commit(place: LakePlace, is_made: bool) -> None:
    lake = place.create()
    commit(lake, 0, *FIRST)
    dies = around_commit(after=Died()) if is_made else around_commit(before=Died())
    with mock.patch.object(DeltaTable, "create_write_transaction", dies), suppress(Died):
        commit(lake, 1, *SECOND)
    assert found(lake) == (expected(*FIRST, *SECOND) if is_made else expected(*FIRST))
    next_one = place.open()
    assert commit(next_one, 1, *SECOND) is not is_made
    assert found(lake) == expected(*FIRST, *SECOND)
    assert list(problems(lake)) == []


@pytest.mark.parametrize("is_made", [False, True])
def test_dying_around_the_commit_of_a_compaction(place: LakePlace, is_made: bool) -> None:
    lake = place.create()
    commit(lake, 0, *FIRST)
    commit(lake, 1, *SECOND)
    dies = around_commit(after=Died()) if is_made else around_commit(before=Died())
    with mock.patch.object(DeltaTable, "create_write_transaction", dies), suppress(Died):
        compact(lake)
    assert found(lake) == expected(*FIRST, *SECOND)
    compact(place.open())
    assert len(lake.files()) == 1
    assert found(lake) == expected(*FIRST, *SECOND)


def test_a_commit_whose_answer_was_lost_is_known_as_ones_own(place: LakePlace) -> None:
    """An object store that got the entry twice, as its client repeated it, says that somebody was faster."""
    lake = place.create()
    lost = around_commit(after=CommitFailedError("0"))
    with mock.patch.object(DeltaTable, "create_write_transaction", lost):
        assert commit(lake, 0, *FIRST)
    assert found(lake) == expected(*FIRST)
    with (
        mock.patch.object(DeltaTable, "create_write_transaction", around_commit(after=OSError("reset"))),
        pytest.raises(LakeError, match="reset"),
    ):
        commit(lake, 1, *SECOND)
    assert not commit(place.open(), 1, *SECOND)  # the next driver finds it there
    assert found(lake) == expected(*FIRST, *SECOND)


_ENDLESS = """
import json, sys
from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from tests.support.lake_messages import commit, messages
lake = Lake.create(sys.argv[1], json.loads(sys.argv[2]))
known = lake.state.positions.get("archive")
batch = 0 if known is None else known.batch + 1
while True:
    rows = [messages(batch * 10, batch * 10 + 10, queue_id=queue_id) for queue_id in range(2)]
    assert commit(lake, batch, *rows)
    batch += 1
    print(f"{batch} batches", flush=True)
    if batch % 4 == 0:
        compact(lake)
"""


def test_kills_at_any_moment(place: LakePlace) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    end = 0
    for _ in range(3):
        process = Running(place.url, json.dumps(place.options), program=(sys.executable, "-c", _ENDLESS))
        try:
            process.wait_for(rf"^{end // 10 + chance.randrange(1, 6)} batches")
            time.sleep(chance.random() * 0.05)  # any moment of the next ones
            process.kill()
        finally:
            process.close()
        lake = place.open()
        known = lake.state.positions.get("archive")
        assert known is not None
        end = (known.batch + 1) * 10
        assert found(lake) == expected(*(messages(0, end, queue_id=queue_id) for queue_id in range(2)))
        assert list(problems(lake)) == []
