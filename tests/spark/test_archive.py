from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
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
from tests.support.lake_messages import all_files, by_manifest


@pytest.fixture(scope="module")
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


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


def source(mq: EmbeddedBroker, topic: str, **options: str) -> dict[str, str]:
    return {"namesrv": mq.namesrv, "subscribe": topic, **options}


def keys(root: Path) -> Counter[str]:
    return Counter(all_files(root, "keys")["keys"].to_pylist())


def numbered(end: int) -> Counter[str]:
    return Counter({f"key-{n}": 1 for n in range(end)})


def test_run_again_it_goes_on_where_it_was(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    seen: list[ArchiveProgress] = []
    send(mq, "again", 0, 300)
    first = archive(spark, root, source(mq, "again"), on_progress=seen.append)
    assert (first.messages, first.files, first.behind) == (300, 4, 0)
    assert seen[-1] is first
    assert archive(spark, root, source(mq, "again")).messages == 0
    send(mq, "again", 300, 400)
    assert archive(spark, root, source(mq, "again")).messages == 100
    assert keys(root) == numbered(400)
    assert list(problems(Lake.open(root))) == []


def test_a_message_is_in_the_lake_as_it_was_sent(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    send(mq, "whole", 0, 3)
    archive(spark, root, source(mq, "whole"))
    table = Lake.open(root).dataset().to_table()
    row = table.filter(pc.equal(table["keys"], "key-2")).to_pylist()[0]
    stored = next(message for message in mq.messages("whole") if message.body == b"body 2")
    assert row["body"] == b"body 2"
    assert row["tags"] == "tag2"
    assert row["topic"] == "whole"
    assert row["unique_key"] == stored.message_id
    assert row["physical_offset"] == stored.physical_offset
    assert row["store_time"] == datetime.fromtimestamp(stored.store_timestamp / 1000, UTC)
    assert row["date"] == str(row["store_time"].date())
    assert dict(row["properties"])["number"] == "2"


def test_batches_of_bounded_size(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "bounded", 0, 250)
    done = archive(spark, tmp_path / "lake", source(mq, "bounded", maxOffsetsPerTrigger="100"))
    assert done.messages == 250
    assert done.batches >= 3
    assert keys(tmp_path / "lake") == numbered(250)


def test_another_archive_goes_on_where_the_lake_ends(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    send(mq, "handed-over", 0, 100)
    archive(spark, root, source(mq, "handed-over"))
    send(mq, "handed-over", 100, 120)
    assert archive(spark, root, source(mq, "handed-over"), name="heir").messages == 20
    assert keys(root) == numbered(120)


def test_where_it_begins_is_remembered_before_there_is_a_message(
    spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path
) -> None:
    root = tmp_path / "lake"
    send(mq, "from-now-on", 0, 10)
    options = source(mq, "from-now-on", startingOffsets="latest")
    assert archive(spark, root, options).messages == 0
    send(mq, "from-now-on", 10, 15)
    assert archive(spark, root, options).messages == 5
    assert keys(root) == numbered(15) - numbered(10)


def test_what_a_filter_left_out_is_not_read_again(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    send(mq, "filtered", 0, 90)
    archive(spark, root, source(mq, "filtered", tags="tag1"))
    (queues,) = Lake.open(root).contents().positions["archive"]["filtered"].values()
    assert Counter(queues) == Counter(str(message.queue.queue_id) for message in mq.messages("filtered"))


def test_a_second_driver_beside_it_is_refused(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    """On a file system whose locks do not work, say; the manifest takes one batch of a number."""
    root = tmp_path / "lake"
    send(mq, "twice", 0, 40)
    planned = ArchiveReader.partitions

    def and_another_commits(reader: ArchiveReader, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Any]:
        Lake.open(root).commit_batch("archive", 0, [], end["q"])
        return planned(reader, start, end)

    with (
        mock.patch.object(ArchiveReader, "partitions", and_another_commits),
        pytest.raises(LakeError, match="another archive archive has written to"),
    ):
        archive(spark, root, source(mq, "twice"))
    assert keys(root).total() == 0
    assert list((root / "_temporary").rglob("*.part")) == []


def test_it_goes_on_until_it_is_stopped(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    send(mq, "going-on", 0, 10)
    stop = threading.Event()

    def watch(progress: ArchiveProgress) -> None:
        if progress.messages == 10:
            send(mq, "going-on", 10, 30)
        if progress.messages == 30:
            stop.set()

    options = source(mq, "going-on")
    done = archive(
        spark, root, options, until_caught_up=False, seconds_between_batches=0.01, on_progress=watch, stop=stop
    )
    assert (done.messages, done.batches, done.behind) == (30, 2, 0)
    assert keys(root) == numbered(30)


def test_topics_that_appear_later_are_archived_too(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    options = {"namesrv": mq.namesrv, "subscribePattern": "shop-.*"}
    send(mq, "shop-a", 0, 10)
    archive(spark, tmp_path / "lake", options)
    send(mq, "shop-b", 0, 20)
    assert archive(spark, tmp_path / "lake", options).messages == 20
    assert {file.topic for file in Lake.open(tmp_path / "lake").files()} == {"shop-a", "shop-b"}


def test_two_archives_share_a_lake(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    root = tmp_path / "lake"
    for topic in ("left", "right"):
        send(mq, topic, 0, 10)
        archive(spark, root, source(mq, topic), name=topic)
    assert {file.topic for file in Lake.open(root).files()} == {"left", "right"}
    with Lake.open(root).writing("left"), pytest.raises(LakeBusy, match="pipeline left is running already"):
        archive(spark, root, source(mq, "left"), name="left")


def test_straight_from_a_store_directory(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path) -> None:
    send(mq, "files", 0, 100)
    wait_for_queue_files(mq.data / "store", "files", 100)
    options = {"storePath": str(mq.data / "store"), "subscribe": "files", "tags": "tag1"}
    assert archive(spark, tmp_path / "lake", options).messages == 33
    assert keys(tmp_path / "lake") == Counter({f"key-{n}": 1 for n in range(1, 100, 3)})


class Died(Exception):
    pass


@pytest.mark.parametrize("moment", ["before the manifest", "after the manifest", "after the files are in place"])
def test_a_driver_that_dies_in_a_commit(spark: SparkSession, mq: EmbeddedBroker, tmp_path: Path, moment: str) -> None:
    """The batch is planned again when the lake has not got it."""
    topic = re.sub(r"\W", "-", moment)
    root = tmp_path / "lake"
    send(mq, topic, 0, 200)
    commit = Lake.commit_batch

    def dies_after(lake: Lake, *arguments: object) -> bool:
        commit(lake, *arguments)  # type: ignore[arg-type]
        raise Died

    target, failing = {
        "before the manifest": ("commit_batch", Died()),
        "after the manifest": ("_put_in_place", Died()),
        "after the files are in place": ("commit_batch", dies_after),
    }[moment]
    with mock.patch.object(Lake, target, autospec=True, side_effect=failing), pytest.raises(Died):
        archive(spark, root, source(mq, topic))
    is_committed = moment != "before the manifest"
    assert by_manifest(Lake.open(root)).total() == (200 if is_committed else 0)
    assert keys(root).total() == (200 if moment == "after the files are in place" else 0)
    # Cut into other tasks now, and so the messages into other files.
    assert archive(spark, root, source(mq, topic, minPartitions="5")).messages == (0 if is_committed else 200)
    assert keys(root) == numbered(200)
    assert list(problems(Lake.open(root))) == []
    assert list((root / "_temporary").rglob("*.part")) == []


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
        archive(spark, tmp_path, source(mq, "again"))
