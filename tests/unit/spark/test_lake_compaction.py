from __future__ import annotations

from datetime import timedelta
from itertools import pairwise

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from downrange.spark.lake import compaction, parquet_file
from downrange.spark.lake.check import problems
from downrange.spark.lake.compaction import compact, plan
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeError, LakeFile
from tests.support.lake_messages import DAY, commit, found, messages, stored, write
from tests.support.object_store import LakePlace


@pytest.fixture
def lake(place: LakePlace) -> Lake:
    """Ten batches of two queues, and another topic and day."""
    lake = place.create()
    for batch in range(10):
        commit(lake, batch, *(messages(batch * 10, batch * 10 + 10, queue_id=queue_id) for queue_id in (0, 1)))
    commit(lake, 10, messages(0, 5, topic="payments"))
    commit(lake, 11, messages(100, 105, begin=DAY + timedelta(days=1)))
    return lake


def test_small_files_of_a_day_become_one_sorted_by_key(lake: Lake) -> None:
    before = found(lake)
    run = compact(lake)[0]
    (file,) = run.files
    assert (run.replaced, file.rows) == (10, 200)
    assert len(lake.files()) == 3
    assert found(lake) == before
    assert list(problems(lake)) == []
    rows = pq.read_table(file.path, filesystem=lake.location.filesystem(), partitioning=None)
    order = rows.select(["keys", "queue_id", "queue_offset"]).to_pylist()
    assert order == sorted(order, key=lambda row: tuple(row.values()))
    assert (file.low["keys"], file.high["queue_offset"]) == ("key-0", 99)


def test_a_second_compaction_finds_nothing(lake: Lake) -> None:
    compact(lake)
    assert compact(lake) == []


def test_replaced_files_stay_for_their_readers_until_they_are_vacuumed(lake: Lake) -> None:
    reading = lake.dataset(["orders"])
    compact(lake)
    assert reading.count_rows() == 205
    assert stored(lake) == 15
    assert (lake.vacuum(168), lake.vacuum(0)) == (0, 12)
    assert stored(lake) == len(lake.files()) == 3


def test_the_archive_goes_on_after_it(lake: Lake) -> None:
    compact(lake)
    assert not commit(lake, 9, messages(90, 100))
    assert commit(lake, 12, messages(105, 110))
    with pytest.raises(LakeError, match="is in the lake already"):
        commit(lake, 0, messages(50, 60), name="another")


def test_only_the_topics_asked_for(lake: Lake) -> None:
    commit(lake, 12, messages(5, 9, topic="payments"))
    assert [run.files[0].topic for run in compact(lake, ["payments"])] == ["payments"]


def test_files_with_and_without_properties_fit_together(lake: Lake) -> None:
    commit(lake, 12, messages(5, 9, topic="payments").drop_columns("properties"))
    compact(lake, ["payments"])
    table = lake.dataset(["payments"]).to_table().sort_by("queue_offset")
    properties = table.column("properties").to_pylist()
    assert properties[5] is None
    assert dict(properties[4])["color"] == "green"


def test_a_key_is_in_one_of_the_files_of_a_run(lake: Lake) -> None:
    size = sum(file.bytes for file in lake.files(["orders"]) if file.date == "2026-11-15")
    run = compact(lake, ["orders"], target_bytes=size // 4)[0]
    assert [file.rows for file in run.files] == [50] * 4
    assert all(one.high["keys"] <= other.low["keys"] for one, other in pairwise(run.files))
    chosen = list(lake.dataset().get_fragments((ds.field("keys") == "key-42") & (ds.field("topic") == "orders")))
    days = [fragment.path for fragment in chosen if "2026-11-15" in fragment.path]
    assert len(days) == 1


def test_a_run_takes_no_more_memory_than_allowed(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "RUN_MEMORY", 3 * messages(0, 10).nbytes)
    run = compact(lake)[0]
    assert (run.replaced, sum(file.rows for file in run.files)) == (10, 200)
    assert max(file.rows for file in run.files) <= 40
    assert found(lake).total() == 210


def test_a_large_file_is_sorted_in_portions(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROW_GROUP_ROWS", 100)
    commit(lake, 12, *(messages(start, start + 100, topic="large") for start in range(0, 1000, 100)))
    monkeypatch.setattr(compaction, "RUN_MEMORY", 3 * messages(0, 100).nbytes)
    (run,) = compact(lake, ["large"], target_bytes=1 << 20)
    assert run.replaced == 1
    assert 2 < len(run.files) < 10
    assert found(lake).total() == 1210
    assert compact(lake, ["large"], target_bytes=4000) == []


def test_a_damaged_file_is_not_copied(lake: Lake) -> None:
    chosen = lake.files(["payments"])[0]
    with lake.location.filesystem().open_input_file(chosen.path) as source:
        damaged = bytearray(source.read())
    damaged[200] ^= 1
    lake.location.write_whole(chosen.path, bytes(damaged))
    with pytest.raises(LakeError):
        compact(lake, ["payments"])
    assert lake.files(["payments"]) == [chosen]


def file(path: str, size: int, second: int = 0, date: str = "2026-11-15") -> LakeFile:
    return LakeFile(path, "orders", date, 1, size, {"store_time": DAY + timedelta(seconds=second)}, {}, {})


def paths(files: list[LakeFile]) -> list[list[str]]:
    return [[item.path for item in group] for group in plan(files, 100)]


def test_a_plan_takes_files_that_are_not_sorted_in_the_order_of_time() -> None:
    assert paths([file("c", 40, 2), file("a", 40, 0), file("large", 160, 1)]) == [["a", "large", "c"]]
    assert paths([file("a", 1), file("b", 1, date="2026-11-16")]) == [["a"], ["b"]]


def test_a_plan_takes_sorted_files_if_they_are_small_and_have_company() -> None:
    small, large = file("compacted-1", 40), file("compacted-2", 60, 1)
    assert paths([small, large]) == []
    assert paths([small, large, file("a", 60, 2)]) == [["compacted-1", "a"]]
    assert paths([small, large, file("compacted-3", 40, 2)]) == [["compacted-1", "compacted-3"]]


def test_somebody_else_replaced_a_file_meanwhile(lake: Lake) -> None:
    """The library itself would let both compactions pass, and have all messages twice."""
    other = Lake(lake.location)
    old = lake.files(["orders"])[:2]
    new = write(lake, messages(0, 20))
    compact(other)
    with pytest.raises(LakeError, match="no longer part of the lake"):
        lake.commit_compaction(old, new)
    assert found(lake).total() == 210


def test_a_row_too_few_stops_it(lake: Lake) -> None:
    chosen = lake.files(["orders"])[0]
    table = pq.read_table(chosen.path, filesystem=lake.location.filesystem(), partitioning=None)
    sink = pa.BufferOutputStream()
    pq.write_table(table.slice(1), sink)
    lake.location.write_whole(chosen.path, sink.getvalue().to_pybytes())
    with pytest.raises(LakeError, match="199 rows read where the log has 200"):
        compact(lake)
    assert len(lake.files(["orders"])) == 11


def test_archive_and_compaction_at_the_same_time(lake: Lake) -> None:
    driver = Lake(lake.location)
    batches = iter(range(12, 40))

    def archive_more(_: object) -> None:
        batch = next(batches)
        commit(driver, batch, messages(batch * 100, batch * 100 + 10))

    assert len(compact(lake, on_run=archive_more)) == 3
    commit(lake, 0, messages(0, 10, topic="third"), name="third")
    assert found(lake).total() == 210 + 3 * 10 + 10
    assert Lake(lake.location).state.positions["archive"].batch == 14
