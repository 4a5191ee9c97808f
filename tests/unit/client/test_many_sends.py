"""`send_all`: every message has its own attempts and its own result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from msgspec import structs

from downrange.client.config import ProducerConfig
from downrange.client.errors import ClientClosed, SendFailed
from downrange.client.producer import many_sends
from downrange.client.producer.outgoing import BodyMissing
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendResult
from downrange.model.message import Message
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply
from tests.unit.client.scripted import Silence, answer_sends, sends, stored, until

ERROR = reply(ResponseCode.SYSTEM_ERROR, "broken")
REFUSED = reply(ResponseCode.MESSAGE_ILLEGAL, "no")


def numbered(count: int) -> list[Message]:
    return [Message(TOPIC, b"%d" % number) for number in range(count)]


def bodies(cluster: FakeCluster) -> list[int]:
    return sorted(
        int(command.body_bytes)
        for broker in cluster.brokers.values()
        for command in broker.asked
        if command.code == RequestCode.SEND_MESSAGE_V2
    )


def places(cluster: FakeCluster, results: list[object]) -> list[tuple[str, int]]:
    assert all(isinstance(result, SendResult) for result in results), results
    return [(result.queue.broker_name, result.queue.queue_id) for result in results if isinstance(result, SendResult)]


async def test_each_message_gets_its_own_result_in_order(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        await producer.send(Message(TOPIC, b"100"))
        results = await producer.send_all(numbered(10))
        ids = [result.message_id for result in results if isinstance(result, SendResult)]
        assert len(set(ids)) == 10
        sent = {
            header.properties.split("\x02")[0].removeprefix("UNIQ_KEY\x01"): command.body_bytes
            for broker in cluster.brokers.values()
            for header, command in zip(
                sends(broker), [each for each in broker.asked if each.code == RequestCode.SEND_MESSAGE_V2], strict=True
            )
        }
        assert [sent[each] for each in ids] == [b"%d" % number for number in range(10)]
        assert await producer.send_all([]) == []
        assert await producer.drain(0)


async def test_queues_come_in_turn_as_for_single_sends(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    told = []
    for way in ("single", "all"):
        async with AsyncProducer("producers", cluster.namesrv, random_source=random.Random(7)) as producer:
            if way == "single":
                results: list[object] = [await producer.send(message) for message in numbered(20)]
            else:
                results = [await producer.send(Message(TOPIC, b"0")), *await producer.send_all(numbered(19))]
            told.append(places(cluster, results))
    assert told[0] == told[1]


async def test_messages_of_one_sharding_key_keep_their_order(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        messages = [Message(TOPIC, b"%d" % number, sharding_key="one") for number in range(3_000)]
        results = await producer.send_all(messages)
        assert len(set(places(cluster, list(results)))) == 1
    (broker,) = [each for each in cluster.brokers.values() if sends(each)]
    asked = [command.body_bytes for command in broker.asked if command.code == RequestCode.SEND_MESSAGE_V2]
    assert asked == [message.body for message in messages]


async def test_the_first_ones_of_a_topic_find_its_route(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        assert len(places(cluster, list(await producer.send_all(numbered(5))))) == 5
    assert bodies(cluster) == [0, 1, 2, 3, 4]


async def test_what_is_wrong_with_one_is_told_in_its_place(cluster: FakeCluster) -> None:
    def answer(command: Command) -> Command:
        return REFUSED(command) if command.body_bytes == b"2" else stored(command)

    answer_sends(cluster, answer)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        messages = numbered(5)
        messages[3].body = b""
        results = await producer.send_all(messages)
        assert [type(result) for result in results] == [SendResult, SendResult, SendFailed, BodyMissing, SendResult]
        assert await producer.drain(0)


async def test_one_that_failed_is_tried_again_while_others_still_wait(cluster: FakeCluster) -> None:
    silence = Silence()
    tried: list[bytes] = []

    def answer(command: Command) -> Command:
        tried.append(command.body_bytes)
        if command.body_bytes == b"0":
            return silence(command)
        return ERROR(command) if tried.count(b"1") == 1 and command.body_bytes == b"1" else stored(command)

    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        for queue in await producer.queues(TOPIC):
            await producer.send(Message(TOPIC, b"9"), queue=queue)
        answer_sends(cluster, answer)
        sending = asyncio.create_task(producer.send_all(numbered(3)))
        await until(lambda: tried.count(b"1") == 2)
        assert not sending.done()
        silence.end()
        results = await sending
        assert [type(result) for result in results] == [SendFailed, SendResult, SendResult]


async def test_few_are_on_their_way_at_once(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_sends, "MOST", 8)
    answer_sends(cluster, stored)
    most = 0

    def messages() -> Iterator[Message]:
        nonlocal most
        for message in numbered(100):
            asked = [producer.session.connection(address) for address in producer.session.addresses_in_use()]
            most = max(most, sum(len(each.requests) for each in asked if each))
            yield message

    async with AsyncProducer("producers", cluster.namesrv) as producer:
        for queue in await producer.queues(TOPIC):
            await producer.send(Message(TOPIC, b"100"), queue=queue)
        results = await producer.send_all(messages())
        assert len(places(cluster, list(results))) == 100
    assert 4 <= most <= 8


@pytest.mark.parametrize("strategy", ["round_robin", "adaptive"])
async def test_who_waits_no_longer_leaves_nothing_behind(cluster: FakeCluster, strategy: str) -> None:
    silence = Silence()
    answer_sends(cluster, stored)
    config = ProducerConfig(fault_strategy=strategy)  # type: ignore[arg-type]
    async with AsyncProducer("producers", cluster.namesrv, config) as producer:
        queues = await producer.queues(TOPIC)
        for queue in queues:
            await producer.send(Message(TOPIC, b"9"), queue=queue)
        learned = producer.chooser.state
        answer_sends(cluster, silence)
        sending = asyncio.create_task(producer.send_all(numbered(20)))
        await until(lambda: len(silence.waiting) == 20)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        asked = [producer.session.connection(address) for address in producer.session.addresses_in_use()]
        assert all(each is None or not each.requests for each in asked)
        assert producer.chooser.state == learned
        assert await producer.drain(0)
        silence.end()


async def test_an_error_of_who_gives_the_messages_is_theirs(cluster: FakeCluster) -> None:
    def messages() -> Iterator[Message]:
        yield from numbered(3)
        raise LookupError("no more")

    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        with pytest.raises(LookupError):
            await producer.send_all(messages())
        assert await producer.drain(0)


async def test_closing_ends_those_that_go_on(cluster: FakeCluster) -> None:
    silence = Silence()
    answer_sends(cluster, silence)
    producer = AsyncProducer("producers", cluster.namesrv)
    await producer.start()
    sending = asyncio.create_task(producer.send_all(numbered(3)))
    await until(lambda: len(silence.waiting) == 3)
    await producer.close(timeout=0)
    results = await sending
    assert {type(result) for result in results} == {ClientClosed}
    silence.end()
    with pytest.raises(ClientClosed):
        await producer.send_all(numbered(1))


async def test_destinations_follow_the_route(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with AsyncProducer("producers", cluster.namesrv) as producer:
        delivery = producer.delivery
        assert delivery.aim(Message(TOPIC, b"1"), None, None, None) is None, "no route is known"
        await producer.send(Message(TOPIC, b"9"))
        before = delivery.aim(Message(TOPIC, b"1"), None, None, None)
        await producer.session.look_up_route(TOPIC)
        again = delivery.aim(Message(TOPIC, b"1"), None, None, None)
        assert before is not None
        assert again is not None
        assert again[2] is before[2], "the route is the same"
        route = producer.session.known_route(TOPIC)
        assert route is not None
        other = structs.replace(route, queue_datas=route.queue_datas[:1])
        producer.session._store_route(TOPIC, other)
        assert delivery.aim(Message(TOPIC, b"1"), None, None, None) is None, "its queues are not known yet"
        result = await producer.send(Message(TOPIC, b"1"))
        assert result.queue.broker_name == other.queue_datas[0].broker_name
