"""What a push consumer should hold, by what brokers say."""

from __future__ import annotations

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.assignment import Assigned, assigned
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.session import Session
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import ConsumerIds, MessageModel
from downrange.protocol.bodies.pop import QueryAssignmentBody
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeCluster, reply

QUERY = RequestCode.QUERY_ASSIGNMENT
SERVER = ConsumerConfig(client_rebalance=False)


def queue(broker: str, queue_id: int) -> MessageQueue:
    return MessageQueue(TOPIC, broker, queue_id)


def answer(*places: tuple[str, int, str]) -> bytes:
    entries = ",".join(
        f'{{"messageQueue":{{"brokerName":"{name}","queueId":{number},"topic":"{TOPIC}"}},"mode":"{mode}"}}'
        for name, number, mode in places
    )
    return b'{"messageQueueAssignments":[%s]}' % entries.encode()


async def ask(cluster: FakeCluster, config: ConsumerConfig = SERVER) -> Assigned:
    async with Session(ClientConfig((cluster.namesrv,))) as session:
        return await assigned(session, GROUP, TOPIC, config)


async def test_a_broker_is_believed_about_its_own_queues(cluster: FakeCluster) -> None:
    """Brokers of RocketMQ answer for all brokers, but know the mode that was set at themselves only."""
    of_a = answer(("broker-a", -1, "POP"), ("broker-b", 0, "PULL"), ("broker-b", 1, "PULL"))
    cluster.brokers["broker-a"].answers[QUERY] = reply(body=of_a)
    of_b = answer(("broker-a", 0, "PULL"), ("broker-b", 1, "PULL"))
    cluster.brokers["broker-b"].answers[QUERY] = reply(body=of_b)
    found = await ask(cluster)
    assert found == Assigned([queue("broker-b", 1)], [queue("broker-a", -1)])
    (question,) = [command for command in cluster.broker.asked if command.code == QUERY]
    body = decode_body(QueryAssignmentBody, question.body_bytes)
    assert (body.topic, body.consumer_group, body.strategy_name, body.message_model) == (
        TOPIC,
        GROUP,
        "AVG",
        "CLUSTERING",
    )


@pytest.mark.parametrize("silence", [reply(body=b"{}"), reply(ResponseCode.SYSTEM_ERROR, "not now")])
async def test_what_is_held_of_a_broker_that_does_not_tell_is_kept(cluster: FakeCluster, silence: object) -> None:
    cluster.brokers["broker-a"].answers[QUERY] = reply(body=answer())
    cluster.brokers["broker-b"].answers[QUERY] = silence  # type: ignore[assignment]
    assert await ask(cluster) == Assigned([], [], frozenset({"broker-b"}))


async def test_brokers_of_4_x_let_consumers_share(cluster: FakeCluster) -> None:
    async with Session(ClientConfig((cluster.namesrv,))) as session:
        members = ConsumerIds(consumer_id_list=(session.client_id,))
        for broker in cluster.brokers.values():
            broker.answers[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = reply(body=members)
        everything = [queue(name, number) for name in cluster.brokers for number in range(2)]
        assert list((await assigned(session, GROUP, TOPIC, SERVER)).pulled) == everything


async def test_broadcasting_needs_no_assignment(cluster: FakeCluster) -> None:
    config = ConsumerConfig(client_rebalance=False, message_model=MessageModel.BROADCASTING)
    assert len((await ask(cluster, config)).pulled) == 4
    assert cluster.broker.asked == []
