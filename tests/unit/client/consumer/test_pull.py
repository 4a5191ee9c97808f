"""What a pull consumer asks brokers for, and whom."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.pull import PullConsumer, PullStatus
from downrange.client.errors import BrokerNotFound
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.model.subscription import SQL92, subscribe
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.pull import PullMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.errors import NoPermission
from tests.unit.client.fake_cluster import TOPIC, Answering, FakeBroker, FakeCluster, reply

QUEUE = MessageQueue(TOPIC, "broker-a", 1)


def empty(suggested: int = 0, code: int = ResponseCode.PULL_NOT_FOUND, next_offset: int = 5) -> Answering:
    header = PullMessageResponse(
        suggest_which_broker_id=suggested, next_begin_offset=next_offset, min_offset=2, max_offset=9
    )
    return reply(code, header=header)


@pytest.fixture
async def consumer(cluster: FakeCluster) -> AsyncIterator[PullConsumer]:
    async with PullConsumer("readers", ClientConfig((cluster.namesrv,))) as opened:
        yield opened


def pulls(broker: FakeBroker) -> list[dict[str, str]]:
    return broker.fields(RequestCode.PULL_MESSAGE)


async def test_a_pull_carries_its_expression_and_commits_nothing(cluster: FakeCluster, consumer: PullConsumer) -> None:
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = empty()
    result = await consumer.pull(QUEUE, 5, 7, subscription="A || B")
    assert (result.status, result.next_offset, result.min_offset, result.max_offset) == (
        PullStatus.NO_NEW_MSG, 5, 2, 9,
    )  # fmt: skip
    (fields,) = pulls(cluster.broker)
    assert fields == {
        "consumerGroup": "readers",
        "topic": TOPIC,
        "queueId": "1",
        "queueOffset": "5",
        "maxMsgNums": "7",
        "sysFlag": "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subscription": "A || B",
        "subVersion": "0",
        "expressionType": "TAG",
        "bname": "broker-a",
    }


@pytest.mark.parametrize(("wait", "is_lite", "flags"), [(0, False, "4"), (2.5, False, "6"), (20, True, "22")])
async def test_the_flags_of_a_pull(
    cluster: FakeCluster, consumer: PullConsumer, wait: float, is_lite: bool, flags: str
) -> None:
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = empty()
    await consumer.pull(QUEUE, 0, wait=wait, is_lite=is_lite)
    (fields,) = pulls(cluster.broker)
    assert (fields["sysFlag"], fields["suspendTimeoutMillis"]) == (flags, str(int(wait * 1000)))


async def test_an_sql_expression_travels_with_its_type(cluster: FakeCluster, consumer: PullConsumer) -> None:
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = empty()
    await consumer.pull(QUEUE, 0, subscription=subscribe(TOPIC, "price > 3", SQL92))
    (fields,) = pulls(cluster.broker)
    assert (fields["subscription"], fields["expressionType"]) == ("price > 3", "SQL92")


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ResponseCode.PULL_NOT_FOUND, PullStatus.NO_NEW_MSG),
        (ResponseCode.PULL_RETRY_IMMEDIATELY, PullStatus.NO_MATCHED_MSG),
        (ResponseCode.PULL_OFFSET_MOVED, PullStatus.OFFSET_ILLEGAL),
        (ResponseCode.SUCCESS, PullStatus.FOUND),
    ],
)
async def test_every_answer_has_its_status(
    cluster: FakeCluster, consumer: PullConsumer, code: int, status: PullStatus
) -> None:
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = empty(code=code, next_offset=8)
    result = await consumer.pull(QUEUE, 5)
    assert (result.status, result.next_offset, list(result.messages)) == (status, 8, [])


async def test_a_refusal_is_an_error(cluster: FakeCluster, consumer: PullConsumer) -> None:
    cluster.broker.answers[RequestCode.PULL_MESSAGE] = reply(ResponseCode.NO_PERMISSION, "forbidden")
    with pytest.raises(NoPermission, match="forbidden"):
        await consumer.pull(QUEUE, 5)


async def test_the_next_pull_goes_to_the_slave_the_broker_suggested_and_commits_to_the_master(
    cluster: FakeCluster,
) -> None:
    """Here broker-b plays the slave of broker-a."""
    master, slave = cluster.brokers["broker-a"], cluster.brokers["broker-b"]
    slave.name = "broker-a"
    topics = (TopicConfig(TOPIC, 2, 2),)
    cluster.brokers["slave"] = slave
    cluster.connections["slave"] = cluster.connections["broker-b"]
    await register_slave(cluster, topics)
    master.answers[RequestCode.PULL_MESSAGE] = empty(suggested=1)
    slave.answers[RequestCode.PULL_MESSAGE] = empty(suggested=0)
    for broker in (master, slave):
        broker.answers[RequestCode.UPDATE_CONSUMER_OFFSET] = reply()
    async with PullConsumer("readers", session=Session(ClientConfig((cluster.namesrv,)))) as consumer:
        for _ in range(3):
            await consumer.pull(QUEUE, 0)
        assert (len(pulls(master)), len(pulls(slave))) == (2, 1)
        await consumer.pull(QUEUE, 0)
        await consumer.commit(QUEUE, 4)
        assert [len(broker.fields(RequestCode.UPDATE_CONSUMER_OFFSET)) for broker in (master, slave)] == [1, 0]
        await consumer.session.close()


async def register_slave(cluster: FakeCluster, topics: tuple[TopicConfig, ...]) -> None:
    from downrange.protocol.bodies.body import encode_body
    from downrange.protocol.bodies.data_version import DataVersion
    from downrange.protocol.bodies.registration import RegisterBrokerBody, RegisterBrokerRequest
    from downrange.protocol.bodies.topics import TopicConfigTable
    from downrange.protocol.command import request

    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(
            topic_config_table={topic.topic_name: topic for topic in topics},
            data_version=DataVersion(counter=99, timestamp=99),
        )
    )
    header = RegisterBrokerRequest(
        broker_name="broker-a",
        broker_addr=cluster.brokers["slave"].address,
        cluster_name="DefaultCluster",
        ha_server_addr="",
        broker_id=1,
    )
    answer = await cluster.connections["slave"].request(
        request(RequestCode.REGISTER_BROKER, header, body=encode_body(body)), timeout=5
    )
    assert answer.code == 0


async def test_a_queue_of_a_broker_that_does_not_serve_the_topic(consumer: PullConsumer) -> None:
    with pytest.raises(BrokerNotFound, match="broker-z"):
        await consumer.pull(MessageQueue(TOPIC, "broker-z", 0), 0)
