"""Reading a store directory without Spark: what a task looks at, and a queue that is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from downrange.spark.errors import DataLost
from downrange.spark.options import SourceOptions, parse_options
from downrange.spark.planner import QueueRange, Reach
from downrange.spark.store_reader import StoreReader, Stores
from downrange.store.check.directory import StoreDirectory
from tests.support.golden_store import unpack


@pytest.fixture
def options(tmp_path: Path) -> SourceOptions:
    root = unpack("clean", tmp_path).root
    return parse_options({"storePath": str(root), "subscribePattern": "[^%].*", "brokerName": "b"})


def planned(options: SourceOptions) -> list[QueueRange]:
    stores = Stores(options)
    reach = stores.reach(stores.queues(), must_answer=True)
    return [QueueRange(queue, there.minimum, there.maximum) for queue, there in reach.items() if there != Reach(0, 0)]


def test_a_task_looks_only_at_the_queues_it_reads(options: SourceOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = planned(options)
    assert len(wanted) > 1

    def lists_all(_: StoreDirectory, kind: str) -> None:
        raise AssertionError(f"a task has listed all of {kind}")

    monkeypatch.setattr(StoreDirectory, "_queue_places", lists_all)
    for one in wanted:
        assert sum(len(fetched.starts) for fetched in StoreReader(options).read([one])) == one.size


def test_a_queue_that_was_removed_meanwhile_is_a_loss(options: SourceOptions) -> None:
    first, second, *_ = planned(options)
    assert options.store_path is not None
    shutil.rmtree(Path(options.store_path) / "consumequeue" / first.queue.topic / str(first.queue.queue_id))
    with pytest.raises(DataLost, match=f"queue {first.queue.queue_id}: the files of message 0 were deleted"):
        list(StoreReader(options).read([first, second]))
    found = list(StoreReader(options).read([first._replace(is_new=True), second]))
    assert {fetched.origin.queue for fetched in found} == {second.queue}
