from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from downrange.spark.lake.check import problems
from downrange.spark.lake.compaction import compact, plan
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeError
from downrange.spark.lake.manifest import LakeFile, Manifest, QueueRange
from tests.support.lake_messages import DAY, by_glob, by_manifest, messages, places, write


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Twenty batches of two queues, and another topic and day."""
    lake = Lake.create(tmp_path / "lake")
    for batch in range(20):
        rows = [messages(batch * 10, batch * 10 + 10, queue_id=queue_id) for queue_id in (0, 1)]
        lake.commit_batch("query", batch, write(lake, *rows))
    lake.commit_batch("query", 20, write(lake, messages(0, 5, topic="payments")))
    lake.commit_batch("query", 21, write(lake, messages(200, 205, begin=DAY + timedelta(days=1))))
    return lake


def test_small_files_of_a_day_become_one(lake: Lake) -> None:
    before = by_manifest(lake)
    done = compact(lake)
    assert [(item.replaced, item.file.rows) for item in done] == [(40, 400)]
    assert done[0].file.ranges == (QueueRange("broker-a", 0, 0, 200), QueueRange("broker-a", 1, 0, 200))
    assert len(lake.files()) == 3
    assert by_manifest(lake) == by_glob(lake.root) == before
    assert list(problems(lake)) == []
    offsets = pq.read_table(lake.path_of(done[0].file)).select(["queue_id", "queue_offset"]).to_pylist()
    assert offsets == sorted(offsets, key=lambda row: (row["queue_id"], row["queue_offset"]))


def test_a_second_compaction_finds_nothing(lake: Lake) -> None:
    compact(lake)
    assert compact(lake) == []


def test_the_archive_goes_on_after_it(lake: Lake) -> None:
    compact(lake)
    assert not lake.commit_batch("query", 19, write(lake, messages(190, 200)))
    assert lake.commit_batch("query", 22, write(lake, messages(205, 210)))
    with pytest.raises(LakeError, match="is in the lake already"):
        lake.commit_batch("another", 0, write(lake, messages(100, 110)))


def test_only_the_topics_asked_for(lake: Lake) -> None:
    lake.commit_batch("query", 22, write(lake, messages(5, 9, topic="payments")))
    assert [item.file.topic for item in compact(lake, ["payments"])] == ["payments"]


def test_files_with_and_without_properties_fit_together(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    lake.commit_batch("query", 0, write(lake, messages(0, 10).drop_columns("properties")))
    lake.commit_batch("query", 1, write(lake, messages(10, 20)))
    compact(lake)
    assert by_glob(lake.root) == places(pa.table(messages(0, 20)))
    properties = lake.dataset().to_table().sort_by("queue_offset").column("properties").to_pylist()
    assert properties[9] is None
    assert dict(properties[10])["color"] == "green"


def file(path: str, size: int, start: int = 0, date: str = "2026-11-15") -> LakeFile:
    return LakeFile(path, "", "orders", date, 1, size, 0, 0, 0, (QueueRange("a", 0, start, start + 1),))


def test_a_plan_takes_small_files_up_to_the_size_wanted() -> None:
    files = [file("c", 40, 2), file("a", 40, 0), file("b", 40, 1), file("large", 60, 3), file("d", 40, 4)]
    assert [[item.path for item in group] for group in plan(files, 100)] == [["a", "b"], ["c", "d"]]
    assert plan([file("a", 1), file("b", 1, date="2026-11-16")], 100) == []


def test_somebody_else_replaced_a_file_meanwhile(lake: Lake) -> None:
    old = lake.files(["orders"])[:2]
    replacement = file("topic=orders/date=2026-11-15/x.parquet", 1)
    compact(lake)
    with pytest.raises(LakeError, match="no longer part of the lake"):
        lake.commit_compaction(old, replacement)


def test_a_writer_that_settles_while_files_are_replaced(lake: Lake) -> None:
    """It read the manifest before the compaction, and looks for the files after it."""
    seen = lake._manifest.recent()
    compact(lake)
    with mock.patch.object(Manifest, "recent", return_value=seen):
        lake.settle()
    assert list(problems(lake)) == []


def test_a_file_that_counts_and_is_nowhere_is_told(lake: Lake) -> None:
    lake.path_of(lake.files()[0]).unlink()
    with pytest.raises(LakeError, match="is lost: the manifest has it and the disk has not"):
        lake.settle()


def test_a_row_too_few_stops_it(lake: Lake) -> None:
    chosen = lake.files(["orders"])[0]
    pq.write_table(pq.read_table(lake.path_of(chosen)).slice(1), lake.path_of(chosen))
    with pytest.raises(LakeError, match="399 rows read where the manifest has 400"):
        compact(lake)
    assert len(lake.files(["orders"])) == 41
