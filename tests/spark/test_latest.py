"""`downrange pipeline latest`: each key has its newest message, in whatever order batches come, whoever is killed."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from downrange import Message
from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.model.properties import encode_properties
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.spark.lake.layout import LakeBusy, LakeError
from downrange.spark.lake.location import Location
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.latest import checked, latest
from downrange.spark.pipelines.latest_table import SCHEMA, LatestTable, joined, keyed, newest
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example
from tests.support.object_store import LakePlace
from tests.support.processes import Running

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
PAGE = ROOT / "docs" / "how-to" / "newest-per-key.md"


def rows(*given: tuple[str, int, bytes]) -> pa.Table:
    """Rows with a key, the second at which they were stored, and a body."""
    values: dict[str, list[Any]] = {name: [None] * len(given) for name in SCHEMA.names}
    values["key"] = [key for key, _, _ in given]
    values["store_time"] = [NOON + timedelta(seconds=second) for _, second, _ in given]
    values["physical_offset"] = [second for _, second, _ in given]
    values["body"] = [body for _, _, body in given]
    values["broker"] = ["broker-a"] * len(given)
    return pa.table(values, SCHEMA)


def content(place: str, options: dict[str, str] | None = None) -> dict[str, bytes]:
    found = DeltaTable(place, storage_options=options).to_pyarrow_table(columns=["key", "body"])
    assert found.num_rows == len(set(found["key"].to_pylist()))
    return dict(zip(found["key"].to_pylist(), found["body"].to_pylist(), strict=True))


def test_messages_have_any_number_of_keys() -> None:
    names = [*SCHEMA.names[1:], "keys"]
    given = {name: [None] * 4 for name in names} | {"keys": ["a b", None, "", " c  a "], "queue_offset": [1, 2, 3, 4]}
    types = [SCHEMA.field(name).type if name != "keys" else pa.string() for name in names]
    batch = pa.record_batch([pa.array(given[name], kind) for name, kind in zip(names, types, strict=True)], names)
    found = keyed(batch)
    pairs = zip(found["key"].to_pylist(), found["queue_offset"].to_pylist(), strict=True)
    assert sorted(pairs) == [("a", 1), ("a", 4), ("b", 1), ("c", 4)]


def test_the_newest_of_each_key() -> None:
    found = newest(rows(("a", 1, b"1"), ("b", 5, b"5"), ("a", 3, b"3"), ("a", 2, b"2")))
    assert found.select(["key", "body"]).to_pylist() == [{"key": "a", "body": b"3"}, {"key": "b", "body": b"5"}]
    assert joined([]).num_rows == 0


def test_batches_in_any_order_end_alike(tmp_path: Path) -> None:
    """Queues are read at different speeds: an older message may come after the one that replaced or deleted it."""
    chance = random.Random(7)
    history = [(f"k{chance.randrange(4)}", second, chance.choice([b"", b"%d" % second])) for second in range(24)]
    last = {key: body for key, _, body in history}
    expected = {key: body for key, body in last.items() if body}
    for attempt in range(3):
        chance.shuffle(history)
        place = str(tmp_path / str(attempt))
        for start in range(0, len(history), 6):
            table = LatestTable(Location.of(place), "orders")  # a new process each time
            table.commit_batch(newest(rows(*history[start : start + 6])), {})
        assert content(place) == expected


def test_of_two_drivers_one_fails(tmp_path: Path) -> None:
    first, second = (LatestTable(Location.of(tmp_path / "table"), "orders") for _ in range(2))
    first.commit_batch(rows(("a", 1, b"1")), {"orders": {"broker-a": {"0": 1}}})
    with pytest.raises(LakeBusy, match="at the same time"):
        second.commit_batch(rows(("a", 1, b"1"), ("b", 2, b"2")), {})
    assert content(str(tmp_path / "table")) == {"a": b"1"}
    again = LatestTable(Location.of(tmp_path / "table"), "orders")
    assert (again.batch, again.position) == (0, {"orders": {"broker-a": {"0": 1}}})


def test_a_batch_that_changes_nothing_moves_on(tmp_path: Path) -> None:
    table = LatestTable(Location.of(tmp_path / "table"), "orders")
    table.commit_batch(rows(), {"orders": {}})
    table.commit_batch(rows(("a", 1, b"")), {"orders": {"broker-a": {}}})
    for number in range(40):
        table.commit_batch(rows((f"k{number}", number, b"x")), {"orders": {"broker-a": {"0": number}}})
    table.tidy(forget=True)
    again = LatestTable(Location.of(tmp_path / "table"), "orders")
    assert (again.batch, again.position) == (41, {"orders": {"broker-a": {"0": 39}}})
    assert len(DeltaTable(tmp_path / "table").file_uris()) == 1


def test_places_that_are_no_such_table(tmp_path: Path) -> None:
    LatestTable(Location.of(tmp_path / "table"), "orders").commit_batch(rows(), {})
    with pytest.raises(LakeError, match="has the keys of orders"):
        LatestTable(Location.of(tmp_path / "table"), "payments")
    DeltaTable.create(tmp_path / "other", SCHEMA)
    with pytest.raises(LakeError, match="has not made"):
        LatestTable(Location.of(tmp_path / "other"), "orders")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x").touch()
    with pytest.raises(LakeError, match="not empty"):
        LatestTable(Location.of(tmp_path / "files"), "orders")
    with pytest.raises(PipelineError, match="expected more than 0"):
        checked({"subscribe": "orders"}, 0)


def send_empty(mq: EmbeddedBroker, key: str) -> None:
    """A message without a body, which our producers refuse to send."""
    header = SendMessageRequest(
        producer_group="testing",
        topic="orders",
        queue_id=0,
        born_timestamp=int(time.time() * 1000),
        properties=encode_properties({"KEYS": key}),
    )

    async def send() -> None:
        async with Session(ClientConfig.of(mq.namesrv)) as session:
            await session.invoke(mq.address, request(RequestCode.SEND_MESSAGE_V2, header))

    asyncio.run(send())


def test_a_topic_becomes_a_table(spark: SparkSession, place: LakePlace) -> None:
    with broker() as mq:
        for number in range(20):
            mq.producer().send(Message("orders", b"%d" % number, keys=f"k{number % 5}"))
        mq.producer().send(Message("orders", b"nobody's"))
        options = {"namesrv": mq.namesrv, "subscribe": "orders"}
        done = latest(spark, place.url, options, storage_options=place.options)
        assert (done.messages, done.inserted, done.keyless, done.behind) == (21, 5, 1, 0)
        assert content(place.url, place.options) == {f"k{number}": b"%d" % (15 + number) for number in range(5)}
        send_empty(mq, "k1")
        mq.producer().send(Message("orders", b"new", keys="k2 k9"))
        capped = {**options, "maxOffsetsPerTrigger": "1"}
        done = latest(spark, place.url, capped, storage_options=place.options)
        assert (done.batches, done.inserted, done.updated, done.deleted) == (2, 1, 1, 1)
        expected = {"k0": b"15", "k2": b"new", "k3": b"18", "k4": b"19", "k9": b"new"}
        assert content(place.url, place.options) == expected
        mq.producer().send(Message("orders", b"bye", "gone", "k2"))
        done = latest(spark, place.url, options, storage_options=place.options, delete_tag="gone")
        assert (done.batches, done.deleted) == (1, 1)
        assert "k2" not in content(place.url, place.options)
        done = latest(spark, place.url, options, storage_options=place.options)
        assert (done.batches, done.messages) == (0, 0)


def test_the_example_of_the_page(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with broker() as mq:
        for number in range(6):
            mq.producer().send(Message("orders", b"%d" % number, keys=f"k{number % 2}"))
        exec(example(PAGE, "latest").replace("127.0.0.1:9876", mq.namesrv), {})  # noqa: S102  our own page
    assert capsys.readouterr().out.startswith("2 new keys\n")


@pytest.mark.slow
@pytest.mark.timeout(900)  # it starts Spark four times
def test_drivers_killed_at_any_moment(spark: SparkSession, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    place = str(tmp_path / "table")
    with broker() as mq:
        mq.create_topic("orders", 3)
        expected: dict[str, bytes] = {}
        producer = mq.producer()
        for _ in range(4):
            for number in range(300):
                key, is_gone = f"k{chance.randrange(40)}", chance.random() < 0.5
                producer.send(Message("orders", b"%d" % number, "gone" if is_gone else None, key))
                expected[key] = b"" if is_gone else b"%d" % number
            driver = Running(
                *("pipeline", "latest", place, "orders", "-n", mq.namesrv, "--master", "local[1]", "--continuous"),
                *("--every", "0.05", "--delete-tag", "gone", "-o", "maxOffsetsPerTrigger=20"),
            )
            try:
                wait_for_batches(Path(place), chance.randrange(1, 12))
                driver.kill()
            finally:
                driver.close()
        options = {"namesrv": mq.namesrv, "subscribe": "orders", "maxOffsetsPerTrigger": "50"}
        latest(spark, place, options, delete_tag="gone")
    assert content(place) == {key: body for key, body in expected.items() if body}


def wait_for_batches(place: Path, count: int) -> None:
    """Wait until the table has so many commits more."""

    def commits() -> int:
        return len(list((place / "_delta_log").glob("*.json")))

    wanted, deadline = commits() + count, time.monotonic() + 120
    while commits() < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
