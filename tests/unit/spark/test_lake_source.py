"""Which files a query on a lake in an object store reads."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThanOrEqual, In, LessThan, StringContains

from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from downrange.spark.lake_source import FilteringLakeReader, LakeReader, lake_schema
from tests.support.lake_messages import DAY, commit, expected, messages, places
from tests.support.object_store import LakePlace

MONDAY = messages(0, 100, begin=DAY)
TUESDAY = messages(100, 200, begin=DAY + timedelta(days=1))
PAYMENTS = messages(0, 50, topic="payments", begin=DAY + timedelta(hours=5))


@pytest.fixture
def lake(place: LakePlace) -> Lake:
    lake = place.create()
    commit(lake, 0, MONDAY, TUESDAY, PAYMENTS)
    return lake


def reader(lake: Lake, *filters: Filter) -> FilteringLakeReader:
    found = FilteringLakeReader(lake.location, lake.table.version(), lake_schema().names)
    assert found.pushFilters(list(filters)) == list(filters)  # Spark looks at every row again
    return found


def read(reader: LakeReader) -> pa.Table:
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches) if batches else pa.table({name: [] for name in lake_schema().names})


def files(reader: LakeReader) -> set[tuple[str, str]]:
    """The topics and days of the files that are read."""
    parts: list[Any] = list(reader.partitions())
    return {(topic, day) for part in parts for _, topic, day in part.files}


def test_without_a_filter_everything_is_read(lake: Lake) -> None:
    assert places(read(reader(lake))) == expected(MONDAY, TUESDAY, PAYMENTS)


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        ([EqualTo(("topic",), "payments")], {("payments", "2026-11-15")}),
        ([In(("topic",), ("payments", "none", None))], {("payments", "2026-11-15")}),
        ([EqualTo(("date",), date(2026, 11, 16))], {("orders", "2026-11-16")}),
        ([LessThan(("store_time",), datetime(2026, 11, 15, 1))], {("orders", "2026-11-15")}),  # noqa: DTZ001  Spark's
        ([GreaterThanOrEqual(("queue_offset",), 150)], {("orders", "2026-11-16")}),
        ([EqualTo(("keys",), "key-5"), EqualTo(("topic",), "orders")], {("orders", "2026-11-15")}),
        ([EqualTo(("topic",), "none")], set()),
        ([StringContains(("topic",), "pay"), EqualTo(("properties", "x"), 1)], {
            ("orders", "2026-11-15"), ("orders", "2026-11-16"), ("payments", "2026-11-15")}),
    ],
)  # fmt: skip
def test_files_that_cannot_match_are_left_out(lake: Lake, filters: list[Filter], chosen: set[tuple[str, str]]) -> None:
    assert files(reader(lake, *filters)) == chosen


def test_a_query_reads_the_version_it_began_with(lake: Lake) -> None:
    begun = reader(lake)
    commit(lake, 1, messages(200, 210, begin=DAY + timedelta(days=1)))
    compact(lake)
    assert places(read(begun)) == expected(MONDAY, TUESDAY, PAYMENTS)
    assert read(reader(lake)).num_rows == 260


def test_only_the_columns_that_are_needed(lake: Lake) -> None:
    some = LakeReader(lake.location, lake.table.version(), ["keys", "date"])
    assert read(some).column_names == ["keys", "date"]
