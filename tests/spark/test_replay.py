from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from pyspark.sql import SparkSession

from downrange.client.errors import NoNameServer
from downrange.spark.lake.compaction import compact
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeBusy, LakeError
from downrange.spark.pipelines import replay as replay_module
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.replay import Counted, ReplayReport, count, replay
from downrange.spark.pipelines.replay_plan import Choice
from downrange.testing import EmbeddedBroker, broker
from tests.support.lake_messages import DAY, commit, messages
from tests.support.object_store import ObjectStore


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


@pytest.fixture(scope="module", params=["disk", "S3"])
def lake(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two queues of orders over two days, one of payments."""
    if request.param == "disk":
        lake = Lake.create(tmp_path_factory.mktemp("replay") / "lake")
    else:
        store: ObjectStore = request.getfixturevalue("s3")
        lake = store.new_place().create()
    rows = [messages(0, 40, queue_id=queue_id, begin=DAY - timedelta(seconds=20), millis=1000) for queue_id in (0, 1)]
    for batch, of_queue in enumerate(rows):
        commit(lake, batch, of_queue)
    commit(lake, len(rows), messages(0, 5, topic="payments"))
    return lake


def bodies(mq: EmbeddedBroker, topic: str) -> list[bytes]:
    return [message.body for message in mq.messages(topic)]


def expected(start: int, end: int) -> set[bytes]:
    return {b"orders %d %d" % (queue_id, offset) for queue_id in (0, 1) for offset in range(start, end)}


def test_everything_once_and_in_order(spark: SparkSession, mq: EmbeddedBroker, lake: Lake) -> None:
    sent: list[int] = []
    choice = Choice("copy", ("orders",))
    assert replay(spark, lake, choice, mq.namesrv, on_sent=sent.append) == ReplayReport(80, 80, False)
    assert sum(sent) == 80
    found = mq.messages("copy")
    assert {message.body for message in found} == expected(0, 40)
    assert len(found) == 80
    queue_0 = [message.body for message in found if message.body.startswith(b"orders 0 ")]
    assert queue_0 == [b"orders 0 %d" % offset for offset in range(40)]
    assert found[0].tags == "tag0"
    assert found[0].properties["color"] == "green"
    assert replay(spark, lake, choice, mq.namesrv) == ReplayReport(0, 80, True)
    assert replay(spark, lake, choice, mq.namesrv, again=True) == ReplayReport(80, 80, False)
    assert len(bodies(mq, "copy")) == 160


def test_by_time_key_and_condition(spark: SparkSession, mq: EmbeddedBroker, lake: Lake) -> None:
    midnight = int(DAY.timestamp() * 1000)
    by_time = Choice("by-time", ("orders",), midnight - 2000, midnight + 1000)
    assert count(spark, lake, by_time) == [
        Counted("orders", "2026-11-14", 4, 44),
        Counted("orders", "2026-11-15", 4, 44),
    ]
    by_key = Choice("by-key", keys=("key-3", "key-39"))
    assert [(one.topic, one.messages) for one in count(spark, lake, by_key)] == [
        ("orders", 2),
        ("orders", 2),
        ("payments", 1),
    ]
    by_sql = Choice("by-sql", ("orders",), where="tags = 'tag1' AND properties['color'] = 'green' AND queue_id = 1")
    assert replay(spark, lake, by_sql, mq.namesrv).sent == 13
    assert set(bodies(mq, "by-sql")) == {b"orders 1 %d" % offset for offset in range(1, 40, 3)}


def test_it_goes_on_where_it_stopped_even_after_a_compaction(
    spark: SparkSession, mq: EmbeddedBroker, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "CHUNK", 25)
    choice = Choice("resumed", ("orders",))
    send = replay_module._Sender.send
    chunks = 0

    def fails(sender: replay_module._Sender, chunk: list[object]) -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 3:
            raise NoNameServer("away")
        send(sender, chunk)  # type: ignore[arg-type]

    with mock.patch.object(replay_module._Sender, "send", fails), pytest.raises(NoNameServer):
        replay(spark, lake, choice, mq.namesrv)
    assert len(bodies(mq, "resumed")) == 40  # a day, in chunks of 25 and 15
    assert compact(lake) != []
    assert replay(spark, lake, choice, mq.namesrv) == ReplayReport(40, 80, False)
    assert sorted(bodies(mq, "resumed")) == sorted(expected(0, 40))


def test_started_again_elsewhere_it_goes_on_there(
    spark: SparkSession, mq: EmbeddedBroker, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "CHUNK", 2)
    choice = Choice("moved", ("payments",), where="1 = 1")
    reports: list[ReplayReport] = []

    def second_run(_: int) -> None:
        if not reports:
            reports.append(replay(spark, Lake(lake.location), choice, mq.namesrv))

    with pytest.raises(LakeBusy, match="started again elsewhere"):
        replay(spark, lake, choice, mq.namesrv, on_sent=second_run)
    assert reports == [ReplayReport(3, 5, False)]
    assert len(bodies(mq, "moved")) == 5


def test_it_can_be_stopped(
    spark: SparkSession, mq: EmbeddedBroker, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "CHUNK", 2)
    stop = threading.Event()
    choice = Choice("stopped", ("payments",))
    report = replay(spark, lake, choice, mq.namesrv, on_sent=lambda _: stop.set(), stop=stop)
    assert report == ReplayReport(2, 2, False)
    assert replay(spark, lake, choice, mq.namesrv) == ReplayReport(3, 5, False)


def test_no_faster_than_wanted(spark: SparkSession, mq: EmbeddedBroker, lake: Lake) -> None:
    """The clock stands still, so every chunk has to wait for its share of time."""
    with mock.patch.object(replay_module, "time") as clock:
        clock.monotonic.return_value = 100.0
        replay(spark, lake, Choice("slow", ("payments",)), mq.namesrv, rate=10)
    waits = [call.args[0] for call in clock.sleep.call_args_list]
    assert waits == pytest.approx([0.2, 0.4, 0.5])  # chunks of 2, 2 and 1


def test_wrong_input(spark: SparkSession, mq: EmbeddedBroker, lake: Lake, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no_such_column"):
        count(spark, lake, Choice("x", where="no_such_column = 1"))
    with pytest.raises(PipelineError, match=r"(?i)syntax error"):
        count(spark, lake, Choice("x", where="tags ="))
    with pytest.raises(PipelineError, match="would never end"):
        replay(spark, lake, Choice("x"), mq.namesrv, rate=0)
    with pytest.raises(LakeError, match="has no messages of nothing"):
        replay(spark, lake, Choice("x", ("nothing",)), mq.namesrv)
    with pytest.raises(LakeError, match="is not a lake"):
        Lake.open(tmp_path)
