"""Simple consumers and brokers that do not do what is asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from downrange.client.consumer.pop.messages import read_popped
from downrange.client.consumer.simple import AsyncSimpleConsumer
from downrange.client.consumer.simple_config import SimpleConsumerConfig
from downrange.client.errors import AckFailed, PopNotSupported
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from tests.unit.client.consumer.test_popped_messages import conversation
from tests.unit.client.fake_cluster import TOPIC, FakeBroker, FakeCluster, fake_cluster, reply

POP, ACK, BATCH = RequestCode.POP_MESSAGE, RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE


def welcome(broker: FakeBroker) -> None:
    broker.answers.update({RequestCode.HEART_BEAT: reply(), RequestCode.UNREGISTER_CLIENT: reply()})


def genuine_pop() -> Command:
    """A genuine answer with several messages."""
    return next(
        answer
        for question, answer in conversation("pop_basic")
        if question.code == POP and len(answer.body_bytes) > 600
    )


def popped(command: Command) -> Command:
    original = genuine_pop()
    return command.reply(0, "FOUND", ext_fields=dict(original.ext_fields), body=original.body_bytes)


async def test_a_broker_of_4_x_is_named(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as cluster:
        welcome(cluster.broker)
        async with AsyncSimpleConsumer("readers", cluster.namesrv) as consumer:
            await consumer.subscribe(TOPIC)
            with pytest.raises(PopNotSupported, match=r"broker broker-a .*does not know POP .*needs RocketMQ 5"):
                await consumer.receive(1, 30, 60)


async def test_a_broker_without_batches_gets_one_acknowledgement_after_the_other(cluster: FakeCluster) -> None:
    for broker in cluster.brokers.values():
        welcome(broker)
        broker.answers[POP] = popped
        broker.answers[ACK] = reply()
    async with AsyncSimpleConsumer("readers", cluster.namesrv) as consumer:
        await consumer.subscribe(TOPIC)
        size = len(read_popped(genuine_pop(), TOPIC, "readers", "broker-a", ""))
        found = await consumer.receive(2 * size, 30, 5)
        await consumer.ack_many(found)
        await consumer.ack_many(found)
        for name, broker in cluster.brokers.items():
            count = sum(message.broker_name == name for message in found)
            codes = Counter(command.code for command in broker.asked)
            assert (codes[BATCH], codes[ACK]) == (min(count, 1), 2 * count)  # it is asked once whether it knows batches


async def test_refused_acknowledgements(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as cluster:
        welcome(cluster.broker)
        cluster.broker.answers[POP] = popped
        refuse = reply(ResponseCode.NO_MESSAGE, "offset is illegal")
        cluster.broker.answers.update({ACK: refuse, BATCH: refuse})
        async with AsyncSimpleConsumer("readers", cluster.namesrv) as consumer:
            await consumer.subscribe(TOPIC)
            found = await consumer.receive(3, 30, 5)
            with pytest.raises(BrokerError, match="offset is illegal"):
                await consumer.ack(found[0])
            with pytest.raises(AckFailed, match="offset is illegal") as failure:
                await consumer.ack_many(found)
            assert not failure.value.retriable


async def test_an_acknowledgement_is_repeated_while_the_broker_starts(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as cluster:
        welcome(cluster.broker)
        cluster.broker.answers[POP] = popped
        answers = [reply(ResponseCode.SERVICE_NOT_AVAILABLE), reply(ResponseCode.SERVICE_NOT_AVAILABLE), reply()]
        cluster.broker.answers[ACK] = lambda command: answers.pop(0)(command)
        async with AsyncSimpleConsumer("readers", cluster.namesrv) as consumer:
            await consumer.subscribe(TOPIC)
            found = await consumer.receive(1, 30, 5)
            await consumer.ack(found[0])
            assert answers == []


async def test_messages_whose_tag_only_looks_right_are_acknowledged(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as cluster:
        welcome(cluster.broker)
        answers = [popped]
        nothing = reply(ResponseCode.POLLING_TIMEOUT)
        cluster.broker.answers[POP] = lambda command: (answers.pop() if answers else nothing)(command)
        cluster.broker.answers.update({ACK: reply(), BATCH: reply()})
        async with AsyncSimpleConsumer("readers", cluster.namesrv) as consumer:
            await consumer.subscribe(TOPIC, "NoSuchTag")
            assert await consumer.receive(32, 30, 0) == []
            assert cluster.broker.asked[-1].code in (ACK, BATCH, POP)
            assert {ACK, BATCH} & {command.code for command in cluster.broker.asked}


async def test_a_namespace_stands_before_topic_and_group(tmp_path: Path) -> None:
    async with fake_cluster(tmp_path) as cluster:
        welcome(cluster.broker)
        cluster.broker.answers[POP] = reply(ResponseCode.POLLING_TIMEOUT)
        config = SimpleConsumerConfig(namespace="ns")
        async with AsyncSimpleConsumer("readers", cluster.namesrv, config) as consumer:
            assert consumer.group == "ns%readers"
            await consumer.subscribe(TOPIC)
            assert [subscription.topic for subscription in consumer.subscriptions] == [f"ns%{TOPIC}"]
