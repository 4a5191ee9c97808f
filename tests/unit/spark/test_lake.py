from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from downrange.spark.lake import lake as lake_module
from downrange.spark.lake import parquet_file, writer
from downrange.spark.lake.check import problems
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeBusy, LakeError, checked_name, file_name, partition_of
from downrange.spark.lake.writer import LakeWriter
from tests.support.lake_messages import DAY, by_glob, by_manifest, messages, places, write


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_a_file_is_named_after_its_messages(lake: Lake) -> None:
    files = write(lake, messages(0, 40), messages(40, 100), messages(7, 9, queue_id=3))
    assert [file.path for file in files] == [
        "topic=orders/date=2026-11-15/broker-a-0-00000000000000000000-00000000000000000099.parquet",
        "topic=orders/date=2026-11-15/broker-a-3-00000000000000000007-00000000000000000008.parquet",
    ]
    assert [(file.rows, file.ranges) for file in files] == [
        (100, (("broker-a", 0, 0, 100),)),
        (2, (("broker-a", 3, 7, 9),)),
    ]


def test_nobody_sees_a_file_before_it_is_committed(lake: Lake) -> None:
    files = write(lake, messages(0, 100))
    assert by_manifest(lake) == by_glob(lake.root) == Counter()
    assert lake.commit_batch("query", 0, files)
    assert by_manifest(lake) == by_glob(lake.root) == places(pa.table(messages(0, 100)))
    assert list(problems(lake)) == []


def test_a_batch_counts_once_however_often_it_is_run(lake: Lake) -> None:
    for attempt in range(3):
        assert lake.commit_batch("query", 0, write(lake, messages(0, 100))) is (attempt == 0)
        # Another run may have cut the same messages into other files.
        assert not lake.commit_batch("query", 0, write(lake, messages(0, 60)) + write(lake, messages(60, 100)))
    assert by_glob(lake.root) == by_manifest(lake) == places(pa.table(messages(0, 100)))
    assert [path for path in (lake.root / "_temporary").rglob("*") if path.is_file()] == []


def test_two_queries_cannot_bring_the_same_messages(lake: Lake) -> None:
    lake.commit_batch("query", 0, write(lake, messages(0, 100)))
    with pytest.raises(LakeError, match="queue 0 of orders on broker-a: offset 50 is in the lake already"):
        lake.commit_batch("another", 0, write(lake, messages(50, 150)))
    assert lake.commit_batch("another", 0, write(lake, messages(100, 150)))
    assert lake.contents().next_offsets == {"orders": {"broker-a": {"0": 150}}}


def test_a_batch_without_messages_leaves_no_trace(lake: Lake) -> None:
    assert not lake.commit_batch("query", 0, [])
    assert lake.contents().version == 0


def test_messages_of_two_days_lie_in_two_directories(lake: Lake) -> None:
    evening = DAY - timedelta(seconds=5)
    lake.commit_batch("query", 0, write(lake, messages(0, 10, begin=evening, millis=1000)))
    found = {file.date: [part[2:] for part in file.ranges] for file in lake.files()}
    assert found == {"2026-11-14": [(0, 5)], "2026-11-15": [(5, 10)]}


def test_a_batch_of_many_queues_in_any_order_is_taken_apart(lake: Lake) -> None:
    batches = [messages(0, 50, queue_id=queue_id, topic=topic) for topic in ("a", "b") for queue_id in range(4)]
    table = pa.Table.from_batches(batches).sort_by([("queue_offset", "ascending"), ("topic", "descending")])
    lake.commit_batch("query", 0, write(lake, table.combine_chunks().to_batches()[0]))
    assert len(lake.files()) == 8
    assert by_manifest(lake) == places(table)
    for file in lake.files():
        assert pq.read_table(lake.path_of(file)).column("queue_offset").to_pylist() == list(range(50))


def test_columns_come_back_as_they_went_in(lake: Lake) -> None:
    lake.commit_batch("query", 0, write(lake, messages(0, 10)))
    table = lake.dataset().to_table()
    assert table.drop_columns("date").equals(pa.Table.from_batches([messages(0, 10)]))
    assert set(table.column("date").to_pylist()) == {"2026-11-15"}
    frame = pandas.read_parquet(lake.root)
    assert str(frame["store_time"].dtype) == "datetime64[us, UTC]"
    assert list(frame["topic"].unique()) == ["orders"]


def test_a_retry_topic_is_written_as_hive_does(lake: Lake) -> None:
    topic = "%RETRY%billing"
    assert partition_of(topic, "2026-11-15") == "topic=%25RETRY%25billing/date=2026-11-15"
    lake.commit_batch("query", 0, write(lake, messages(0, 10, topic=topic, broker="a/b")))
    assert by_glob(lake.root) == by_manifest(lake) == places(pa.table(messages(0, 10, topic=topic, broker="a/b")))


def test_row_groups_are_large_and_files_are_cut(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 1)  # a row group, and the file is full
    files = write(lake, *(messages(start, start + 50) for start in range(0, 500, 50)))
    assert [file.rows for file in files] == [100] * 5
    assert pq.ParquetFile(lake.root / files[0].temporary).metadata.num_row_groups == 1


def test_a_writer_holds_little_in_memory(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_BUFFERED_BYTES", 10_000)
    target = LakeWriter(lake.root, "archive")
    for start in range(0, 1000, 50):
        for queue_id in range(4):
            target.add(messages(start, start + 50, queue_id=queue_id))
        assert sum(item.file.buffered_bytes for item in target._open.values()) <= 10_000
    assert lake.commit_batch("query", 0, target.finish())
    assert by_manifest(lake).total() == 4000


def test_a_failed_task_leaves_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROW_GROUP_ROWS", 10)
    target = LakeWriter(lake.root, "archive")
    target.add(messages(0, 50))
    target.discard()
    assert list((lake.root / "_temporary" / "archive").iterdir()) == []


def test_what_a_dead_task_left_is_swept_by_the_next_writer(lake: Lake) -> None:
    write(lake, messages(0, 10))
    with lake.writing("archive"):
        assert list((lake.root / "_temporary" / "archive").iterdir()) == []


def test_one_writer_of_a_name_at_a_time(lake: Lake) -> None:
    with (
        lake.writing("archive"),
        lake.writing("another"),
        pytest.raises(LakeBusy, match="pipeline archive is running already"),
        lake.writing("archive"),
    ):
        pass


def test_files_are_chosen_by_topic_and_time(lake: Lake) -> None:
    lake.commit_batch("query", 0, write(lake, messages(0, 1000), messages(0, 10, topic="payments")))
    lake.commit_batch("query", 1, write(lake, messages(1000, 2000)))
    start = int(DAY.timestamp() * 1000)
    assert [file.rows for file in lake.files(["payments"])] == [10]
    assert [file.rows for file in lake.files(["orders"], start + 1000, start + 1500)] == [1000]
    assert len(lake.files(["orders"], start + 999, start + 1000)) == 2
    assert lake.files(["orders"], start + 5000) == []
    with pytest.raises(LakeError, match="no such messages"):
        lake.dataset(["nothing"])


def test_many_entries_become_one(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "SNAPSHOT_ENTRIES", 4)
    for batch in range(10):
        lake.commit_batch("query", batch, write(lake, messages(batch * 10, batch * 10 + 10)))
        lake.settle()
    names = sorted(path.name for path in (lake.root / "_manifest").iterdir() if path.suffix == ".json")
    assert names == [f"{9:020}.json", f"{10:020}.json", f"snapshot-{8:020}.json"]
    assert by_manifest(lake) == by_glob(lake.root) == places(pa.table(messages(0, 100)))
    assert lake.contents().batches == {"query": 9}
    assert not lake.commit_batch("query", 9, write(lake, messages(90, 100)))


def test_a_directory_with_other_things_is_no_lake(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="is not a lake"):
        Lake.open(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(LakeError, match="is not a lake and not empty"):
        Lake.create(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(LakeError, match="cannot make a lake"):
        Lake.create(file / "lake")


def test_a_damaged_manifest_is_named(lake: Lake) -> None:
    lake.commit_batch("query", 0, write(lake, messages(0, 10)))
    (lake.root / "_manifest" / f"{1:020}.json").write_text("{")
    with pytest.raises(LakeError, match=r"00001\.json is damaged"):
        lake.contents()


def test_check_finds_what_is_wrong(lake: Lake) -> None:
    lake.commit_batch("query", 0, write(lake, messages(0, 10), messages(0, 10, queue_id=1), messages(0, 9, queue_id=2)))
    missing, flipped, _ = (lake.path_of(file) for file in lake.files())
    stray = missing.with_name("stray.parquet")
    missing.rename(stray)
    content = bytearray(flipped.read_bytes())
    content[20] ^= 1
    flipped.write_bytes(content)
    found = sorted(problems(lake))
    assert len(found) == 3
    assert found[0].endswith(f"{missing.name}: missing")
    assert f"{flipped.name}: not what was written" in found[1]
    assert found[2].endswith("stray.parquet: not in the manifest")


def test_messages_without_their_place_are_refused(lake: Lake) -> None:
    with pytest.raises(LakeError, match="need the columns topic, store_time"):
        write(lake, messages(0, 10).drop_columns(["topic", "store_time"]))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 65, "a b"])
def test_a_name_that_is_no_directory_name_is_refused(name: str) -> None:
    with pytest.raises(LakeError, match="cannot name a pipeline"):
        checked_name(name)


def test_a_broker_name_cannot_leave_its_directory() -> None:
    assert "/" not in file_name("../../etc", 0, 0, 1)
