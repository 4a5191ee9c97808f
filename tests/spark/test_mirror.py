"""Two clusters and a mirror between them: everything arrives, as it was, once, and groups go on at the other side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from downrange import Message
from downrange.cli.main import main
from downrange.client.admin import Admin
from downrange.client.admin.offsets import QueueMove
from downrange.client.admin.queue_reading import committed_at
from downrange.client.config import ClientConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig
from downrange.spark.mirror_rows import MIRROR_OFFSET, MIRROR_PATH
from downrange.spark.pipelines.errors import PipelineError
from downrange.spark.pipelines.mirror import mirror, plan
from downrange.spark.pipelines.mirror_clusters import Mirror
from downrange.testing import EmbeddedBroker, broker
from tests.docs.test_docs import ROOT, example


@pytest.fixture(scope="module")
def east() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


@pytest.fixture(scope="module")
def west() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


def to_west(east: EmbeddedBroker, west: EmbeddedBroker, topic: str, checkpoint: Path) -> Mirror:
    return Mirror(
        {"namesrv": east.namesrv, "subscribe": topic},
        {"namesrv": west.namesrv},
        str(checkpoint),
        name=topic,
        source_cluster="east",
        target_cluster="west",
    )


def by_queue(messages: list[ReceivedMessage]) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for message in sorted(messages, key=lambda one: (one.queue_id, one.queue_offset)):
        found.setdefault(message.queue_id, []).append(message.body)
    return found


def test_messages_stay_what_they_were(
    spark: SparkSession, east: EmbeddedBroker, west: EmbeddedBroker, tmp_path: Path
) -> None:
    east.create_topic("orders", 6)
    producer = east.producer()
    for number in range(40):
        producer.send(
            Message(
                "orders", b"%d" % number, "paid", f"k{number} x", sharding_key=f"s{number % 7}", properties={"a": "ä"}
            )
        )
    producer.send_batch([Message("orders", b"batch %d" % number, keys="b") for number in range(30)])
    producer.send(Message("orders", b"x" * 50_000))
    wanted = to_west(east, west, "orders", tmp_path / "checkpoint")
    planned = plan(wanted)
    assert [(one.topic, one.queues, one.messages, one.target_queues, one.needed_queues) for one in planned.topics] == [
        ("orders", 6, 71, 0, 6)
    ]
    done = mirror(spark, wanted)
    assert (done.read, done.mirrored, done.behind) == (71, 71, 0)
    there, here = west.messages("orders"), east.messages("orders")
    assert by_queue(there) == by_queue(here)
    before = {message.message_id: message for message in here}
    for copy in there:
        original = before[copy.message_id]
        assert (copy.tags, copy.keys, copy.born_timestamp, copy.body) == (
            original.tags,
            original.keys,
            original.born_timestamp,
            original.body,
        )
        assert copy.properties.get("a") == original.properties.get("a")
        assert copy.properties.get("__SHARDINGKEY") == original.properties.get("__SHARDINGKEY")
        assert copy.properties[MIRROR_PATH] == "east"
        place = f"east/{original.queue.broker_name}/{original.queue_id}/{original.queue_offset}"
        assert copy.properties[MIRROR_OFFSET] == place
    lost_checkpoint = replace(
        wanted, checkpoint=str(tmp_path / "other"), source={**wanted.source, "startingOffsets": "earliest"}
    )
    assert mirror(spark, lost_checkpoint).read == 71
    assert len(west.messages("orders")) == 71  # the target knew what it has


def test_a_delayed_message_arrives_when_it_is_due_and_does_not_wait_again(
    spark: SparkSession, east: EmbeddedBroker, west: EmbeddedBroker, tmp_path: Path
) -> None:
    east.create_topic("later", 1)
    east.producer().send(Message("later", b"after a second", delay_level=1))
    east.producer().send(Message("later", b"after two hours", delay_level=18))
    east.wait_for("later", 1, 60)
    assert mirror(spark, to_west(east, west, "later", tmp_path / "checkpoint")).mirrored == 1
    [original], [copy] = east.messages("later"), west.messages("later")
    assert copy.body == original.body == b"after a second"
    assert copy.born_timestamp == original.born_timestamp
    assert copy.store_timestamp >= original.store_timestamp >= original.born_timestamp + 1000


def test_a_message_does_not_come_back(
    spark: SparkSession, east: EmbeddedBroker, west: EmbeddedBroker, tmp_path: Path
) -> None:
    for mq in (east, west):
        mq.create_topic("both", 2)
        mq.producer().send(Message("both", b"from %s" % (b"east" if mq is east else b"west")))
    there = to_west(east, west, "both", tmp_path / "there")
    back = Mirror(
        {"namesrv": west.namesrv, "subscribe": "both"},
        {"namesrv": east.namesrv},
        str(tmp_path / "back"),
        name="back",
        source_cluster="west",
        target_cluster="east",
    )
    for _ in range(2):
        mirror(spark, there)
        mirror(spark, back)
    assert sorted(message.body for message in east.messages("both")) == [b"from east", b"from west"]
    assert sorted(message.body for message in west.messages("both")) == [b"from east", b"from west"]


def test_a_group_moves_to_the_other_side(
    spark: SparkSession, east: EmbeddedBroker, west: EmbeddedBroker, tmp_path: Path
) -> None:
    east.create_topic("bills", 2)
    west.create_topic("bills", 2)
    west.producer().send(Message("bills", b"a message of the west itself"))
    producer = east.producer()
    broker_name = producer.send(Message("bills", b"0")).queue.broker_name
    queues = [MessageQueue("bills", broker_name, queue_id) for queue_id in (0, 1)]
    for number in range(200):
        producer.send(Message("bills", b"%d" % number), queue=queues[number % 2])
    commit(east, "billing", {queues[0]: 33, queues[1]: 0})
    wanted = replace(to_west(east, west, "bills", tmp_path / "checkpoint"), groups=("billing",))
    assert mirror(spark, wanted).group_queues == 1  # a queue without a commit begins at 0 anyway
    here = by_queue(east.messages("bills"))
    there = by_queue(west.messages("bills"))
    at = committed(west, "billing", queues)
    assert there[0][at[0] :] == here[0][33:]
    assert set(here[1]) <= set(there[1][at[1] :])
    assert [place.is_ahead for place in plan(wanted).groups] == [False, False]
    commit(east, "billing", {queues[0]: len(here[0]), queues[1]: 50})
    assert mirror(spark, wanted).group_queues == 2
    at = committed(west, "billing", queues)
    assert at[0] == len(there[0])
    assert there[1][at[1] :] == here[1][50:]
    commit(east, "billing", {queues[1]: 10})
    assert mirror(spark, wanted).group_queues == 0, "a group that is further at the target is not thrown back"


def commit(mq: EmbeddedBroker, group: str, offsets: dict[MessageQueue, int]) -> None:
    async def tell() -> None:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            (master,) = await admin.session.masters()
            await admin.groups.create(SubscriptionGroupConfig(group), broker=master.name)
            moves = [QueueMove(queue, None, None, offset) for queue, offset in offsets.items()]
            written = await admin.offsets.write(group, {master: moves})
            assert not written.failed

    asyncio.run(tell())


def committed(mq: EmbeddedBroker, group: str, queues: list[MessageQueue]) -> list[int]:
    async def ask() -> list[int]:
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            (master,) = await admin.session.masters()
            found = [await committed_at(admin.session, master, group, queue) for queue in queues]
            return [offset for offset in found if offset is not None]

    return asyncio.run(ask())


def test_clusters_of_one_name_must_be_told_apart(east: EmbeddedBroker, west: EmbeddedBroker, tmp_path: Path) -> None:
    wanted = replace(to_west(east, west, "orders", tmp_path), source_cluster="here", target_cluster="here")
    with pytest.raises(PipelineError, match="tell them apart by --from-cluster and --to-cluster"):
        plan(wanted)


def test_the_example_of_the_page(
    spark: SparkSession,
    east: EmbeddedBroker,
    west: EmbeddedBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    east.producer().send(Message("shopping", b"eggs"))
    page = ROOT / "docs" / "how-to" / "mirror-a-cluster.md"
    text = example(page, "functions").replace("east:9876", east.namesrv).replace("west:9876", west.namesrv)
    exec(text.replace('"orders"', '"shopping"'), {})  # noqa: S102  our own page
    assert capsys.readouterr().out == "1 to mirror\n1 mirrored, 0 to go\n"


def test_the_command_shows_its_plan_and_wrong_calls_in_one_line(
    east: EmbeddedBroker, west: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["downrange", "pipeline", "mirror", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.out if code == 0 else shown.err

    east.create_topic("plans", 3)
    east.producer().send(Message("plans", b"one"))
    sides = ("--from", east.namesrv, "--to", west.namesrv, "--checkpoint", "nowhere")
    assert "both called DefaultCluster" in run("plans", *sides, "--dry-run", code=2)
    named = (*sides, "--from-cluster", "east", "--to-cluster", "west", "--dry-run")
    assert "1 messages would go from east to west" in run("plans", *named)
    assert "no topic nothing that may be read" in run("nothing", *named, code=2)
    assert "say where to: --to" in run("plans", code=2)
    assert "deliveryLevel" in run("plans", *named, "--to-option", "deliveryLevel=transactional", code=2)
    assert west.messages("plans") == []
