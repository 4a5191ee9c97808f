"""The archive, into a lake on a disk and into one in an object store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.spark.lake.check import problems
from downrange.spark.lake.lake import Lake
from downrange.spark.lake.layout import LakeBusy, LakeError
from downrange.spark.pipelines.archive import ArchiveProgress, archive
from downrange.spark.pipelines.archive_reader import ArchiveReader
from downrange.spark.pipelines.errors import PipelineError
from downrange.testing import EmbeddedBroker, broker
from tests.spark.messages import wait_for_queue_files
from tests.support.lake_messages import column
from tests.support.object_store import LakePlace

_numbers = count()
Archive = Callable[..., ArchiveProgress]


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


@pytest.fixture
def topic() -> str:
    """A topic of this test alone, which runs once for each place."""
    return f"orders-{next(_numbers)}"


@pytest.fixture
def run(spark: SparkSession, mq: EmbeddedBroker, place: LakePlace) -> Archive:
    """Archive a topic, or what the options of the source say, into the place of the test."""

    def run(topic: str | None = None, options: dict[str, str] | None = None, **more: Any) -> ArchiveProgress:
        source = {**({} if topic is None else {"subscribe": topic}), **(options or {})}
        if "storePath" not in source:
            source["namesrv"] = mq.namesrv
        return archive(spark, place.url, source, storage_options=place.options, **more)

    return run


def send(mq: EmbeddedBroker, topic: str, start: int, end: int) -> None:
    producer = mq.producer()
    waiting = [
        producer.send_async(
            Message(topic, b"body %d" % n, tags=f"tag{n % 3}", keys=f"key-{n}", properties={"number": str(n)})
        )
        for n in range(start, end)
    ]
    for one in waiting:
        one.result(10)


def keys(place: LakePlace) -> Counter[object]:
    return column(place.open(), "keys")


def numbered(end: int) -> Counter[object]:
    return Counter({f"key-{n}": 1 for n in range(end)})


def test_run_again_it_goes_on_where_it_was(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    seen: list[ArchiveProgress] = []
    send(mq, topic, 0, 300)
    first = run(topic, on_progress=seen.append)
    assert (first.messages, first.files, first.behind) == (300, 1, 0)
    assert seen[-1] is first
    assert run(topic).messages == 0
    send(mq, topic, 300, 400)
    assert run(topic).messages == 100
    assert keys(place) == numbered(400)
    assert list(problems(place.open())) == []


def test_a_message_is_in_the_lake_as_it_was_sent(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str
) -> None:
    send(mq, topic, 0, 3)
    run(topic)
    table = place.open().dataset().to_table()
    row = table.filter(pc.equal(table["keys"], "key-2")).to_pylist()[0]
    stored = next(message for message in mq.messages(topic) if message.body == b"body 2")
    assert row["body"] == b"body 2"
    assert row["tags"] == "tag2"
    assert row["topic"] == topic
    assert row["unique_key"] == stored.message_id
    assert row["physical_offset"] == stored.physical_offset
    assert row["store_time"] == datetime.fromtimestamp(stored.store_timestamp / 1000, UTC)
    assert row["date"] == row["store_time"].date()
    assert dict(row["properties"])["number"] == "2"


def test_batches_of_bounded_size(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    send(mq, topic, 0, 250)
    done = run(topic, {"maxOffsetsPerTrigger": "100"})
    assert done.messages == 250
    assert done.batches >= 3
    assert keys(place) == numbered(250)


def test_another_archive_goes_on_where_the_lake_ends(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str
) -> None:
    send(mq, topic, 0, 100)
    run(topic)
    send(mq, topic, 100, 120)
    assert run(topic, name="heir").messages == 20
    assert keys(place) == numbered(120)


def test_where_it_begins_is_remembered_before_there_is_a_message(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str
) -> None:
    send(mq, topic, 0, 10)
    latest = {"startingOffsets": "latest"}
    assert run(topic, latest).messages == 0
    send(mq, topic, 10, 15)
    assert run(topic, latest).messages == 5
    assert keys(place) == numbered(15) - numbered(10)


def test_what_a_filter_left_out_is_not_read_again(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str
) -> None:
    send(mq, topic, 0, 90)
    run(topic, {"tags": "tag1"})
    (queues,) = place.open().state.positions["archive"].next[topic].values()
    assert Counter(queues) == Counter(str(message.queue.queue_id) for message in mq.messages(topic))


def test_a_second_driver_beside_it_is_refused(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    send(mq, topic, 0, 40)
    planned = ArchiveReader.partitions

    def and_another_commits(reader: ArchiveReader, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Any]:
        place.open().commit_batch("archive", 0, [], start["q"])
        return planned(reader, start, end)

    with (
        mock.patch.object(ArchiveReader, "partitions", and_another_commits),
        pytest.raises(LakeBusy, match="another archive archive has written to"),
    ):
        run(topic)
    assert keys(place).total() == 0
    run(topic)
    assert keys(place) == numbered(40)


def test_it_goes_on_until_it_is_stopped(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    send(mq, topic, 0, 10)
    stop = threading.Event()

    def watch(progress: ArchiveProgress) -> None:
        if progress.messages == 10:
            send(mq, topic, 10, 30)
        if progress.messages == 30:
            stop.set()

    done = run(topic, until_caught_up=False, seconds_between_batches=0.01, on_progress=watch, stop=stop)
    assert (done.messages, done.batches, done.behind) == (30, 2, 0)
    assert keys(place) == numbered(30)


def test_topics_that_appear_later_are_archived_too(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str
) -> None:
    options = {"subscribePattern": f"shop-{topic}-.*"}
    send(mq, f"shop-{topic}-a", 0, 10)
    run(options=options)
    send(mq, f"shop-{topic}-b", 0, 20)
    assert run(options=options).messages == 20
    assert {file.topic for file in place.open().files()} == {f"shop-{topic}-a", f"shop-{topic}-b"}


def test_two_archives_share_a_lake(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    for name in ("left", "right"):
        send(mq, f"{topic}-{name}", 0, 10)
        run(f"{topic}-{name}", name=name)
    assert {file.topic for file in place.open().files()} == {f"{topic}-left", f"{topic}-right"}
    assert sorted(place.open().state.positions) == ["left", "right"]


def test_straight_from_a_store_directory(run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str) -> None:
    send(mq, topic, 0, 100)
    wait_for_queue_files(mq.data / "store", topic, 100)
    assert run(topic, {"storePath": str(mq.data / "store"), "tags": "tag1"}).messages == 33
    assert keys(place) == Counter({f"key-{n}": 1 for n in range(1, 100, 3)})


class Died(Exception):
    pass


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_driver_that_dies_around_a_commit(
    run: Archive, mq: EmbeddedBroker, place: LakePlace, topic: str, is_committed: bool
) -> None:
    """The batch is planned again when the lake has not got it."""
    send(mq, topic, 0, 200)
    commit = Lake.commit_batch

    def dies(lake: Lake, *arguments: object) -> bool:
        if is_committed:
            commit(lake, *arguments)  # type: ignore[arg-type]
        raise Died

    with mock.patch.object(Lake, "commit_batch", dies), pytest.raises(Died):
        run(topic)
    assert keys(place).total() == (200 if is_committed else 0)
    # Cut into other tasks now, and so the messages into other files.
    assert run(topic, {"minPartitions": "5"}).messages == (0 if is_committed else 200)
    assert keys(place) == numbered(200)
    assert list(problems(place.open())) == []


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"subscribe": "nowhere"}, PipelineError, "no topic nowhere"),
        ({}, Exception, "nothing to read is named"),
        ({"subscribe": "a", "nonsense": "1"}, Exception, "unknown option nonsense"),
    ],
)
def test_wrong_input_is_one_line(
    spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path, options: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        archive(spark, tmp_path / "lake", {"namesrv": mq.namesrv, **options})
    assert len(str(raised.value).splitlines()) == 1


def test_a_directory_with_other_things_is_left_alone(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(LakeError, match="not a lake and not empty"):
        archive(spark, tmp_path, {"namesrv": mq.namesrv, "subscribe": "orders"})
