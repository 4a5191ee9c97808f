"""A JavaScript client of RocketMQ, `ali-ons`, written by others, against our name server and broker."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import pytest

from downrange import PushConsumer, ReceivedMessage
from downrange.model.message_id import parse_offset_message_id
from tests.support.node import consumer, node_modules, produce
from tests.support.requests import connected, create_topic, drain, wait_for_route
from tests.support.standalone_process import Standalone, standalone_process

# Level 2 is for the delay test; retries begin with level 3 and would take 10 s with RocketMQ's own levels.
DELAY_LEVELS = "1s 2s " + "1s " * 16


TOPICS = [
    *("nodeBasics", "nodeLarge", "nodeOrdered", "nodeDelay", "nodeTags", "nodeRetry", "nodeDead"),
    *("nodeShared", "nodeBroadcast", "nodeOffsets", "nodeMixed"),
]


async def create_topics(servers: Standalone) -> None:
    """This client refuses to send to a topic without a route, so that nothing is ever created by sending."""
    async with connected(servers.broker) as broker, connected(servers.namesrv) as namesrv:
        for topic in TOPICS:
            await create_topic(broker, topic, queues=4)
        for topic in TOPICS:
            await wait_for_route(namesrv, topic)


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    node_modules()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone_process(tmp_path_factory.mktemp("ali-ons"), {"messageDelayLevel": DELAY_LEVELS.strip()}) as running:
        asyncio.run(create_topics(running))
        yield running
        assert running.process.stop() == 0
        assert running.process.errors == ""


def test_what_was_sent_with_tag_keys_and_properties_arrives_so(servers: Standalone) -> None:
    (sent,) = produce(
        servers.namesrv,
        {
            "topic": "nodeBasics",
            "body": "grüße, 世界",
            "tag": "TagA",
            "keys": ["order-1", "order-2"],
            "properties": {"colour": "blue"},
        },
    )
    assert sent["sendStatus"] == "SEND_OK"
    with consumer(namesrv=servers.namesrv, group="nodeBasicsGroup", topic="nodeBasics") as reader:
        (message,) = reader.wait_for_messages(1)
    assert message["body"] == "grüße, 世界"
    assert message["tags"] == "TagA"
    assert message["keys"] == "order-1 order-2"
    assert message["properties"]["colour"] == "blue"
    assert message["reconsumeTimes"] == 0
    assert (message["queueId"], message["queueOffset"]) == (sent["queueId"], sent["queueOffset"])
    assert message["msgId"] == sent["msgId"]
    assert str(parse_offset_message_id(sent["msgId"]).store_host) == servers.broker


def test_a_body_the_client_compresses_arrives_whole(servers: Standalone) -> None:
    body = "compressible " * 1000
    produce(servers.namesrv, {"topic": "nodeLarge", "body": body})
    with consumer(namesrv=servers.namesrv, group="nodeLargeGroup", topic="nodeLarge") as reader:
        (message,) = reader.wait_for_messages(1)
    assert message["body"] == body


def test_messages_of_one_sharding_key_keep_their_queue_and_their_order(servers: Standalone) -> None:
    keys = sharding_keys(3)
    bodies = [f"{keys[number % 3]}:{number}" for number in range(30)]
    sent = produce(
        servers.namesrv,
        *({"topic": "nodeOrdered", "body": body, "shardingKey": body.partition(":")[0]} for body in bodies),
    )
    queue_of = {line["body"].partition(":")[0]: line["queueId"] for line in sent}
    assert all(line["queueId"] == queue_of[line["body"].partition(":")[0]] for line in sent)
    with consumer(namesrv=servers.namesrv, group="nodeOrderedGroup", topic="nodeOrdered") as reader:
        received = [line["body"] for line in reader.wait_for_messages(30)]
    for key in keys:
        assert [body for body in received if body.startswith(key)] == [body for body in bodies if body.startswith(key)]


def test_a_delayed_message_comes_when_it_is_due(servers: Standalone) -> None:
    with consumer(namesrv=servers.namesrv, group="nodeDelayGroup", topic="nodeDelay") as reader:
        produce(servers.namesrv, {"topic": "nodeDelay", "body": "later", "delayLevel": 2})
        (message,) = reader.wait_for_messages(1)
    assert message["body"] == "later"
    assert 2000 <= message["at"] - message["bornTimestamp"] < 12_000  # or else it came when somebody looked again


def test_a_consumer_gets_only_the_tags_it_subscribed_to(servers: Standalone) -> None:
    tags = ["TagA", "TagB", "TagC"]
    produce(
        servers.namesrv,
        *(
            {"topic": "nodeTags", "body": f"{tags[number % 3]}-{number}", "tag": tags[number % 3]}
            for number in range(30)
        ),
        {"topic": "nodeTags", "body": "last", "tag": "TagB"},
    )
    with consumer(namesrv=servers.namesrv, group="nodeTagsGroup", topic="nodeTags", tag="TagA || TagB") as reader:
        received = reader.wait_for_messages(21)
        assert sorted(line["body"] for line in received) == sorted(
            ["last", *(f"{tags[number % 3]}-{number}" for number in range(30) if number % 3 < 2)]
        )


def test_a_refused_message_comes_again_once_through_the_retry_topic(servers: Standalone) -> None:
    (sent,) = produce(servers.namesrv, {"topic": "nodeRetry", "body": "at the second try", "tag": "TagA"})
    with consumer(namesrv=servers.namesrv, group="nodeRetryGroup", topic="nodeRetry", failures=1) as reader:
        first, second = reader.wait_for_messages(2)
    assert [first["reconsumeTimes"], second["reconsumeTimes"]] == [0, 1]
    assert first["body"] == second["body"] == "at the second try"
    assert second["properties"]["RETRY_TOPIC"] == "nodeRetry"
    assert second["properties"]["ORIGIN_MESSAGE_ID"] == sent["msgId"]
    assert second["at"] - first["at"] >= 1000


async def test_a_message_refused_too_often_ends_in_the_dead_letter_queue(servers: Standalone) -> None:
    produce(servers.namesrv, {"topic": "nodeDead", "body": "unwanted"})
    async with connected(servers.broker) as broker:
        with consumer(
            namesrv=servers.namesrv, group="nodeDeadGroup", topic="nodeDead", failures=99, maxReconsumeTimes=1
        ) as reader:
            attempts = reader.wait_for_messages(2)
            assert [line["reconsumeTimes"] for line in attempts] == [0, 1]
            async with asyncio.timeout(30):
                while not (dead := await drain(broker, "%DLQ%nodeDeadGroup", 1)):
                    await asyncio.sleep(0.05)
            assert len(reader.messages()) == 2
    (message,) = dead
    assert message.body == b"unwanted"
    assert message.properties["RETRY_TOPIC"] == "nodeDead"
    assert message.reconsume_times == 2


def test_two_consumers_of_a_group_share_the_queues_and_get_each_message_once(servers: Standalone) -> None:
    options = {"namesrv": servers.namesrv, "group": "nodeSharedGroup", "topic": "nodeShared"}
    with consumer(**options) as first, consumer(**options) as second:
        first.wait_until(lambda: len(first.assigned()) == len(second.assigned()) == 2)
        assert first.assigned() | second.assigned() == {0, 1, 2, 3}
        bodies = [f"shared-{number}" for number in range(40)]
        produce(servers.namesrv, *({"topic": "nodeShared", "body": body} for body in bodies))
        first.wait_until(lambda: len(first.messages()) + len(second.messages()) == 40)
        assert {line["queueId"] for line in first.messages()} <= first.assigned()
        assert {line["queueId"] for line in second.messages()} <= second.assigned()
        received = sorted(line["body"] for line in first.messages() + second.messages())
        assert received == sorted(bodies)
        second.stop()
        first.wait_until(lambda: len(first.assigned()) == 4)


def test_a_python_and_a_javascript_consumer_share_one_group(servers: Standalone) -> None:
    bodies = [f"mixed-{number}" for number in range(60)]
    ours: list[tuple[int, str]] = []

    def note(message: ReceivedMessage) -> None:
        ours.append((message.queue_id, message.body.decode()))

    with consumer(namesrv=servers.namesrv, group="nodeMixedGroup", topic="nodeMixed") as theirs:
        theirs.wait_until(lambda: len(theirs.assigned()) == 4)
        with PushConsumer("nodeMixedGroup", servers.namesrv, on_message=note) as mine:
            mine.subscribe("nodeMixed")
            theirs.wait_until(lambda: len(theirs.assigned()) == len(held(mine)) == 2)
            assert theirs.assigned() | held(mine) == {0, 1, 2, 3}
            produce(servers.namesrv, *({"topic": "nodeMixed", "body": body} for body in bodies))
            theirs.wait_until(lambda: len(theirs.messages()) + len(ours) >= 60)
            both = [line["body"] for line in theirs.messages()] + [body for _, body in ours]
            assert sorted(both) == sorted(bodies)
            assert theirs.messages()
            assert {queue_id for queue_id, _ in ours} <= held(mine)
        theirs.wait_until(lambda: len(theirs.assigned()) == 4)


def held(consumer: PushConsumer) -> set[int]:
    return {queue.queue_id for queue in consumer.queues if queue.topic == "nodeMixed"}


def test_every_broadcasting_consumer_gets_every_message(servers: Standalone) -> None:
    produce(servers.namesrv, {"topic": "nodeBroadcast", "body": "before anybody listens"})
    options = {
        "namesrv": servers.namesrv,
        "group": "nodeBroadcastGroup",
        "topic": "nodeBroadcast",
        "broadcast": True,
    }
    with consumer(**options) as first, consumer(**options) as second:
        bodies = [f"to all {number}" for number in range(10)]
        produce(servers.namesrv, *({"topic": "nodeBroadcast", "body": body} for body in bodies))
        for reader in (first, second):
            assert sorted(line["body"] for line in reader.wait_for_messages(10)) == bodies


def test_a_restarted_consumer_goes_on_where_it_stopped(servers: Standalone) -> None:
    options = {"namesrv": servers.namesrv, "group": "nodeOffsetsGroup", "topic": "nodeOffsets"}
    produce(servers.namesrv, *({"topic": "nodeOffsets", "body": f"before {number}"} for number in range(8)))
    with consumer(**options) as reader:
        reader.wait_for_messages(8)
        assert reader.stop() == 0
        assert reader.lines("closed")
    produce(servers.namesrv, *({"topic": "nodeOffsets", "body": f"after {number}"} for number in range(8)))
    with consumer(**options) as reader:
        assert sorted(line["body"] for line in reader.wait_for_messages(8)) == [f"after {n}" for n in range(8)]


def sharding_keys(count: int) -> list[str]:
    """Keys the client maps to queues 1 to 3 of four; those of queue 0 it spreads over all, a defect of its own."""
    keys = (f"key{number}" for number in range(1000))
    return [key for key in keys if int.from_bytes(hashlib.md5(key.encode()).digest()[:4], "big") % 4][:count]  # noqa: S324
