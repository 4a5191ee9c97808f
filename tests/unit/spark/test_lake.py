"""A lake without Spark, on a disk and in an object store."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from downrange.spark.lake import parquet_file, writer
from downrange.spark.lake.check import problems
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeError, checked_name, file_name, partition_of
from downrange.spark.lake.location import Location
from downrange.spark.lake.writer import LakeWriter
from tests.support.lake_messages import DAY, commit, expected, found, messages, stored, write
from tests.support.object_store import SECRET, LakePlace, ObjectStore


@pytest.fixture
def lake(place: LakePlace) -> Lake:
    return place.create()


@pytest.fixture
def local(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_a_file_is_named_after_its_first_message_and_has_statistics(local: Lake) -> None:
    batches = messages(0, 40), messages(40, 100), messages(7, 9, queue_id=3), messages(7, 9, topic="payments")
    first, second = write(local, *batches)
    assert first.path.startswith("topic=orders/date=2026-11-15/broker-a-0-00000000000000000000-")
    assert (first.rows, first.low["queue_offset"], first.high["queue_offset"]) == (102, 0, 99)
    assert (first.low["queue_id"], first.high["queue_id"]) == (0, 3)
    assert second.path.startswith("topic=payments/date=2026-11-15/broker-a-0-00000000000000000007-")
    known = json.loads(second.statistics)
    assert known["numRecords"] == 2
    assert known["maxValues"]["store_time"] == "2026-11-15T00:00:00.008000Z"
    assert known["maxValues"]["keys"] == "key-8"
    assert known["nullCount"]["tags"] == 0
    assert "body" not in known["minValues"]


def test_nobody_sees_a_file_before_it_is_committed(lake: Lake) -> None:
    files = write(lake, messages(0, 100))
    assert found(lake) == Counter()
    assert lake.commit_batch("archive", 0, files, {"orders": {"broker-a": {"0": 100}}})
    assert found(lake) == expected(messages(0, 100))
    assert list(problems(lake)) == []
    state = Lake(lake.location).state
    assert state.positions["archive"].next == state.ends == {"orders": {"broker-a": {"0": 100}}}
    assert lake.table.transaction_version("archive") == 0


def test_a_batch_counts_once_however_often_it_is_run(lake: Lake) -> None:
    assert commit(lake, 0, messages(0, 100))
    for other in (lake, Lake(lake.location)):  # the second one is another driver
        assert not commit(other, 0, messages(0, 100))
        # Another run may have cut the same messages into other files.
        assert not commit(other, 0, messages(0, 60), messages(60, 100))
    assert found(lake) == expected(messages(0, 100))


def test_two_archives_cannot_bring_the_same_messages(lake: Lake) -> None:
    commit(lake, 0, messages(0, 100))
    with pytest.raises(LakeError, match="queue 0 of orders on broker-a: offset 50 is in the lake already"):
        commit(lake, 0, messages(50, 150), name="another")
    assert commit(lake, 0, messages(100, 150), name="another")
    assert lake.state.ends == {"orders": {"broker-a": {"0": 150}}}


def test_archives_that_commit_at_the_same_time(lake: Lake) -> None:
    """Neither loses the position of another, and of those with the same queue one is refused."""
    refused: list[str] = []

    def archive(name: str, queue_id: int) -> None:
        own = Lake(lake.location)
        for batch in range(4):
            rows = messages(batch * 10, batch * 10 + 10, queue_id=queue_id)
            try:
                own.commit_batch(name, batch, write(own, rows), {"orders": {"broker-a": {str(queue_id): batch}}})
            except LakeError:
                refused.append(name)
                return

    threads = [threading.Thread(target=archive, args=(f"archive-{n}", n % 3)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1
    assert found(lake) == expected(*(messages(0, 40, queue_id=queue_id) for queue_id in range(3)))
    positions = Lake(lake.location).state.positions
    assert [positions[name].batch for name in sorted(positions) if name not in refused] == [3, 3, 3]


def test_another_program_may_commit_between(lake: Lake) -> None:
    commit(lake, 0, messages(0, 10))
    foreign = DeltaTable(lake.location.url, storage_options=dict(lake.location.storage_options))
    foreign.optimize.compact()
    for _ in range(2):
        foreign.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"})
    assert Lake(lake.location).state.positions["archive"].batch == 0
    assert commit(lake, 1, messages(10, 20))
    assert found(lake) == expected(messages(0, 20))


def test_messages_of_two_days_lie_in_two_partitions(local: Lake) -> None:
    commit(local, 0, messages(0, 10, begin=DAY - timedelta(seconds=5), millis=1000))
    dates = {file.date: (file.low["queue_offset"], file.high["queue_offset"]) for file in local.files()}
    assert dates == {"2026-11-14": (0, 4), "2026-11-15": (5, 9)}


def test_a_task_of_many_queues_writes_one_file_for_each_topic(local: Lake) -> None:
    batches = [
        messages(start, start + 50, queue_id=queue_id, topic=topic)
        for topic in ("a", "b")
        for queue_id in range(40)
        for start in (10, 60)
    ]
    commit(local, 0, *batches)
    assert [(file.topic, file.rows) for file in sorted(local.files())] == [("a", 4000), ("b", 4000)]
    assert found(local) == expected(*batches)
    for file in local.files():
        rows = pq.read_table(f"{local.location}/{file.path}", partitioning=None)
        places = list(zip(rows["queue_id"].to_pylist(), rows["queue_offset"].to_pylist(), strict=True))
        assert places == sorted(places)
    assert local.state.ends == {topic: {"broker-a": {str(number): 110 for number in range(40)}} for topic in "ab"}


def test_a_batch_with_messages_of_several_queues_is_refused(local: Lake) -> None:
    queues = messages(0, 10), messages(0, 10, queue_id=1), messages(10, 20)
    mixed = pa.Table.from_batches(queues).combine_chunks().to_batches()[0]
    with pytest.raises(LakeError, match="messages of several queues"):
        write(local, mixed)


def test_columns_come_back_as_they_went_in(lake: Lake) -> None:
    rows = messages(0, 10)
    commit(lake, 0, rows)
    table = lake.dataset().to_table()
    assert table.select(rows.schema.names).to_pylist() == rows.to_pylist()
    assert {str(date) for date in table.column("date").to_pylist()} == {"2026-11-15"}
    assert lake.dataset(["payments"]).count_rows() == 0


def test_a_retry_topic_is_written_as_hive_does(lake: Lake) -> None:
    topic = "%RETRY%billing"
    assert partition_of(topic, "2026-11-15") == "topic=%25RETRY%25billing/date=2026-11-15"
    rows = messages(0, 10, topic=topic, broker="a/b")
    commit(lake, 0, rows)
    assert found(lake) == expected(rows)
    assert [file.rows for file in lake.files([topic])] == [10]
    assert list(problems(lake)) == []


def test_row_groups_are_large_and_files_are_cut(local: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 1)  # a row group, and the file is full
    files = write(local, *(messages(start, start + 50) for start in range(0, 500, 50)))
    assert [file.rows for file in files] == [100] * 5
    assert pq.ParquetFile(f"{local.location}/{files[0].path}").metadata.num_row_groups == 1


def test_a_writer_holds_little_in_memory(local: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_BUFFERED_BYTES", 10_000)
    target = LakeWriter(local.location)
    for start in range(0, 1000, 50):
        for topic in ("a", "b", "c", "d"):
            target.add(messages(start, start + 50, topic=topic))
            held = sum(one.file.buffered_bytes for one in target._open.values())
            assert held == target._buffered_bytes <= 10_000
    assert local.commit_batch("archive", 0, target.finish(), {})
    assert found(local).total() == 4000


def test_a_failed_task_leaves_nothing(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 3000)
    target = LakeWriter(lake.location)
    for start in range(0, 50, 10):
        target.add(messages(start, start + 10))
    assert stored(lake) > 0
    target.discard()
    assert stored(lake) == 0


def test_files_that_nobody_needs_are_vacuumed(lake: Lake) -> None:
    commit(lake, 0, messages(0, 10))
    write(lake, messages(10, 20))  # its batch was never committed
    assert (stored(lake), lake.vacuum(168)) == (2, 0)  # it may still be
    assert lake.vacuum(0) == 1
    assert stored(lake) == 1
    assert commit(lake, 1, messages(10, 20))
    assert found(lake) == expected(messages(0, 20))


def test_files_are_chosen_by_topic_and_time(lake: Lake) -> None:
    commit(lake, 0, messages(0, 1000), messages(0, 10, topic="payments"))
    commit(lake, 1, messages(1000, 2000))
    start = int(DAY.timestamp() * 1000)
    assert [file.rows for file in lake.files(["payments"])] == [10]
    assert [file.rows for file in lake.files(["orders"], start + 1000, start + 1500)] == [1000]
    assert len(lake.files(["orders"], start + 999, start + 1000)) == 2
    assert lake.files(["orders"], start + 5000) == []
    late = ds.field("store_time") >= datetime(2026, 11, 15, 0, 0, 1, 500_000, tzinfo=UTC)
    assert len(list(lake.dataset().get_fragments(late))) == 1  # by the statistics of the log


def test_many_commits_become_a_checkpoint(local: Lake) -> None:
    for batch in range(102):
        local.commit_batch("archive", batch, [], {"orders": {"broker-a": {"0": batch}}})
    assert list((Path(local.location.url) / "_delta_log").glob("*.checkpoint.parquet"))
    assert Lake(local.location).state.positions["archive"].batch == 101


def test_a_power_cut_in_a_commit_may_leave_an_empty_entry(local: Lake) -> None:
    """The library does not sync the log; we do, behind it. In between the newest entry may lose its content."""
    commit(local, 0, messages(0, 10))
    commit(local, 1, messages(10, 20))
    (Path(local.location.url) / "_delta_log" / f"{2:020}.json").write_bytes(b"")
    after = Lake(local.location)
    assert after.state.positions["archive"].batch == 0
    assert commit(after, 1, messages(10, 20))
    assert found(after) == expected(messages(0, 20))


def test_a_place_with_other_things_is_no_lake(place: LakePlace, tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="is not a lake"):
        place.open()
    Location.of(place.url, place.options).write_whole("photos/1.jpg", b"")
    with pytest.raises(LakeError, match="is not a lake and not empty"):
        place.create()
    (tmp_path / "file").touch()
    with pytest.raises(LakeError, match="file"):
        Lake.create(tmp_path / "file" / "lake")
    DeltaTable.create(str(tmp_path / "other"), pa.schema([("a", pa.int64())]))
    with pytest.raises(LakeError, match="a Delta table that no archive has made"):
        Lake.create(tmp_path / "other")
    with pytest.raises(LakeError, match="cannot be at ftp://x/y: expected a directory"):
        Lake.open("ftp://x/y")


def test_an_object_store_that_refuses_is_told_in_one_line(s3: ObjectStore) -> None:
    with pytest.raises(LakeError, match=r"^s3://no-such-bucket/lake: .*NoSuchBucket") as told:
        Lake.create("s3://no-such-bucket/lake", s3.options)
    assert len(str(told.value).splitlines()) == 1
    assert "\x1b" not in str(told.value)


def test_an_object_store_without_credentials_says_how_to_give_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(LakeError, match=r"^s3://bucket/lake: no credentials: give them with --storage-option or in"):
        Lake.open("s3://bucket/lake")


def test_secrets_are_not_shown(s3: ObjectStore) -> None:
    place = s3.new_place()
    lake = place.create()
    assert SECRET not in f"{lake!r} {lake.location!r} {lake.location} {write(lake, messages(0, 3))}"


def test_check_finds_what_is_wrong(lake: Lake) -> None:
    for queue_id in range(4):
        commit(lake, queue_id, messages(0, 10, queue_id=queue_id))
    missing, flipped, short, twice = lake.files()
    location = lake.location
    location.remove(missing.path)
    content = bytearray(location.read_whole(flipped.path) or b"")
    content[20] ^= 1
    location.write_whole(flipped.path, bytes(content))
    location.write_whole(short.path, (location.read_whole(short.path) or b"")[:-1])
    copy = twice._replace(path=twice.path.replace("broker-a", "copy"))
    location.write_whole(copy.path, location.read_whole(twice.path) or b"")
    lake.commit_compaction([], [copy])
    wrong = sorted(problems(lake))
    assert len(wrong) == 3 + 10
    assert f"{missing.path}: missing" in wrong
    assert any(f"{flipped.path}: damaged" in line for line in wrong)
    assert f"{short.path}: {short.bytes - 1} bytes, expected {short.bytes}" in wrong
    assert "queue 3 of orders on broker-a: offset 7 is there 2 times on 2026-11-15" in wrong


def test_messages_without_their_place_are_refused(local: Lake) -> None:
    with pytest.raises(LakeError, match="need the columns topic, store_time"):
        write(local, messages(0, 10).drop_columns(["topic", "store_time"]))


def test_long_keys_are_cut_in_statistics(local: Lake) -> None:
    rows = messages(0, 2)
    keys = pa.array(["a" * 200, "b" * 200])
    (file,) = write(local, rows.set_column(rows.schema.get_field_index("keys"), "keys", keys))
    assert file.low["keys"] == "a" * 128
    assert "b" * 200 < file.high["keys"] < "c"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 65, "a b"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(LakeError, match="cannot name a pipeline"):
        checked_name(name)


def test_a_broker_name_cannot_leave_its_directory() -> None:
    assert "/" not in file_name("../../etc", 0, 0)
