"""A lake as a DataFrame: Spark's own reader of files on a disk, ours of an object store."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession

from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from downrange.spark.pipelines.frames import lake_frame
from downrange.spark.pipelines.sql import View, ViewKind, sql
from tests.support.lake_messages import DAY, Place, commit, expected, messages, write
from tests.support.object_store import SECRET, LakePlace

RETRIED = "%RETRY%billing"
ROWS = [
    messages(0, 40, begin=DAY - timedelta(seconds=20), millis=1000),
    messages(0, 30, topic=RETRIED),
    messages(0, 20, topic="2026"),
]


@pytest.fixture
def lake(place: LakePlace) -> Lake:
    lake = place.create()
    commit(lake, 0, *ROWS)
    write(lake, messages(40, 50))  # never committed
    return lake


def seen(frame: DataFrame) -> Counter[Place]:
    rows = frame.select("topic", "broker", "queue_id", "queue_offset").collect()
    return Counter(tuple(row) for row in rows)


def test_each_message_once_before_and_after_a_compaction(spark: SparkSession, lake: Lake) -> None:
    assert seen(lake_frame(spark, lake)) == expected(*ROWS)
    commit(lake, 1, messages(40, 45, begin=DAY - timedelta(seconds=20), millis=1000))
    compact(lake)
    everything = expected(*ROWS, messages(40, 45))
    assert seen(lake_frame(spark, lake)) == everything
    assert seen(lake_frame(spark, lake, [RETRIED])) == expected(ROWS[1])


def test_a_span_of_store_times_includes_its_ends(spark: SparkSession, lake: Lake) -> None:
    midnight = int(DAY.timestamp() * 1000)
    found = lake_frame(spark, lake, ["orders"], midnight - 2000, midnight + 1000)
    assert sorted(row.queue_offset for row in found.collect()) == [18, 19, 20, 21]
    assert lake_frame(spark, lake, ["none"]).count() == 0


def test_values_are_those_of_the_messages(spark: SparkSession, lake: Lake) -> None:
    row = lake_frame(spark, lake, ["2026"]).where("queue_offset = 7").collect()[0]
    assert (row.topic, row.keys, bytes(row.body), str(row.date)) == ("2026", "key-7", b"2026 0 7", "2026-11-15")
    assert row.properties["color"] == "green"
    assert row.born_host is None


def test_a_query_does_not_show_the_options_of_the_object_store(
    spark: SparkSession, lake: Lake, place: LakePlace
) -> None:
    view = View("lake", ViewKind.LAKE, place.url, place.options)
    result = sql(spark, "SELECT topic, count(*) AS n FROM lake WHERE date = '2026-11-15' GROUP BY topic", [view])
    assert {row.topic: row.n for row in result.collect()} == {"orders": 20, RETRIED: 30, "2026": 20}
    plan = result._jdf.queryExecution().toString()
    assert SECRET not in f"{plan} {view!r}"


def test_in_a_session_that_passes_no_filters_to_sources(spark: SparkSession, lake: Lake) -> None:
    setting = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(setting)
    spark.conf.set(setting, "false")
    try:
        assert seen(lake_frame(spark, lake, [RETRIED])) == expected(ROWS[1])
    finally:
        spark.conf.set(setting, before or "false")
