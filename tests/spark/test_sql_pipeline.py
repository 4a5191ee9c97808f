from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from downrange import Message
from downrange.spark.errors import OptionError
from downrange.spark.lake.lake import Lake
from downrange.spark.pipelines.errors import PipelineError, PipelineFailed
from downrange.spark.pipelines.sql import View, ViewKind, sql, start_stream, write_parquet
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import wait_for_queue_files
from tests.support.lake_messages import commit, messages, write


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        producer = running.producer()
        for number in range(60):
            producer.send(Message("live", b"%d" % number, tags=f"tag{number % 3}", keys=f"key-{number}"))
        wait_for_queue_files(running.data / "store", "live", 60)
        yield running


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake.create(tmp_path_factory.mktemp("sql") / "lake")
    commit(lake, 0, messages(0, 30))
    write(lake, messages(30, 60))  # never committed
    return lake


@pytest.fixture
def views(mq: EmbeddedBroker, lake: Lake) -> list[View]:
    return [
        View("live", ViewKind.TOPIC, "live", {"namesrv": mq.namesrv}),
        View("store", ViewKind.STORE, str(mq.data / "store")),
        View("lake", ViewKind.LAKE, str(lake.location)),
    ]


def test_a_topic_a_store_and_a_lake_in_one_query(spark: SparkSession, views: list[View], tmp_path: Path) -> None:
    result = sql(
        spark,
        """
        SELECT live.tags, count(*) AS both, count(store.keys) AS stored
        FROM live JOIN lake ON live.keys = lake.keys LEFT JOIN store ON store.keys = live.keys AND store.topic = 'live'
        GROUP BY live.tags ORDER BY live.tags
        """,
        views,
    )
    assert [tuple(row) for row in result.collect()] == [("tag0", 10, 10), ("tag1", 10, 10), ("tag2", 10, 10)]
    write_parquet(result, tmp_path / "out")
    assert sum(pq.read_table(tmp_path / "out")["both"].to_pylist()) == 30
    with pytest.raises(PipelineError, match="is there already"):
        write_parquet(result, tmp_path / "out")


def test_a_stream_until_it_is_caught_up(spark: SparkSession, views: list[View]) -> None:
    rows: list[tuple[object, ...]] = []

    def keep(batch: DataFrame) -> None:
        rows.extend(tuple(row) for row in batch.collect())

    live = View("live", ViewKind.TOPIC, "live", {**views[0].options, "startingOffsets": "earliest"})
    query = "SELECT live.keys, lake.topic FROM live LEFT JOIN lake ON live.keys = lake.keys WHERE live.tags = 'tag1'"
    result = sql(spark, query, [live, views[2]], streaming=True)
    start_stream(result, on_rows=keep, until_caught_up=True).awaitTermination()
    assert sorted(rows, key=str) == sorted(
        ((f"key-{number}", "orders" if number < 30 else None) for number in range(1, 60, 3)), key=str
    )


@pytest.mark.parametrize(
    ("query", "text"),
    [("SELECT nothing FROM lake", "nothing"), ("SELEKT 1", r"(?i)syntax error"), ("SELECT 1 FROM nowhere", "nowhere")],
)
def test_a_wrong_query_is_one_line(spark: SparkSession, views: list[View], query: str, text: str) -> None:
    with pytest.raises(PipelineError, match=text) as raised:
        sql(spark, query, views[2:])
    assert "\n" not in str(raised.value)


def test_wrong_views(spark: SparkSession, views: list[View], tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="two views have the same name"):
        sql(spark, "SELECT 1", [views[2], views[2]])
    with pytest.raises(PipelineError, match="reads no stream"):
        sql(spark, "SELECT keys FROM lake", views[2:], streaming=True)
    with pytest.raises(OptionError, match="unknown option nonsense"):
        sql(spark, "SELECT keys FROM x", [View("x", ViewKind.TOPIC, "live", {"nonsense": "1"})])
    missing = View("x", ViewKind.TOPIC, "nowhere", dict(views[0].options))
    with pytest.raises((PipelineError, PipelineFailed), match="no topic nowhere"):
        write_parquet(sql(spark, "SELECT keys FROM x", [missing]), tmp_path / "never")
