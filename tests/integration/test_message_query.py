"""Messages found again on two brokers: by either id, by key and time; from the client and from the command line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from downrange import testing
from downrange.cli.main import app
from downrange.client.admin import Admin
from downrange.client.compression import plain_body
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import MessageNotFound, NoRoute
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendResult
from downrange.clock import ManualClock
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.support.broker_client import client_of
from tests.support.two_brokers import TwoBrokers, two_brokers

TOPIC = "lookup"
START = 1_800_000_000_000


class Filled(NamedTuple):
    """Two brokers with messages of one key, stored a second apart, on broker-a and broker-b in turn."""

    cluster: TwoBrokers
    admin: Admin
    sent: list[SendResult]


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[Filled]:
    clock = ManualClock(START)
    async with two_brokers(tmp_path, clock=clock) as cluster, Admin(ClientConfig.of(cluster.namesrv)) as admin:
        (await admin.topics.create(TopicConfig(TOPIC, 1, 1), "DefaultCluster")).raise_if_none()
        sent = []
        async with AsyncProducer("shop", cluster.namesrv) as producer:
            for number in range(6):
                message = Message(TOPIC, b"%d" % number, keys=f"all k{number}")
                queue = MessageQueue(TOPIC, "broker-a" if number % 2 == 0 else "broker-b", 0)
                sent.append(await producer.send(message, queue=queue))
                await clock.advance(1)
        yield Filled(cluster, admin, sent)


async def bodies(filled: Filled, key: str, **options: int) -> dict[str, list[bytes]]:
    found = await filled.admin.messages.by_key(TOPIC, key, **options)
    assert not found.failed
    return {broker.name: [message.body for message in messages] for broker, messages in found.done.items()}


async def test_either_id_finds_a_message_wherever_it_lies(filled: Filled) -> None:
    for number, result in enumerate(filled.sent):
        for message in (
            await filled.admin.messages.by_offset_id(result.offset_message_id),
            await filled.admin.messages.by_unique_key(TOPIC, result.message_id),
            await filled.admin.messages.view(result.message_id, TOPIC),
            await filled.admin.messages.view(result.offset_message_id, TOPIC),
        ):
            assert (message.body, message.message_id) == (b"%d" % number, result.message_id)
            assert message.offset_message_id == result.offset_message_id


async def test_a_key_is_looked_for_on_all_brokers(filled: Filled) -> None:
    assert await bodies(filled, "all") == {"broker-a": [b"0", b"2", b"4"], "broker-b": [b"1", b"3", b"5"]}
    assert await bodies(filled, "k3") == {"broker-a": [], "broker-b": [b"3"]}
    assert await bodies(filled, "nobody's") == {"broker-a": [], "broker-b": []}


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (START + 1000, START + 3000, [b"1", b"2", b"3"]),
        (START + 1001, START + 2999, [b"2"]),
        (START + 3000, START + 3000, [b"3"]),
        (START + 5001, START + 9000, []),
        (0, START, [b"0"]),
        (START + 3000, START + 1000, []),
    ],
)
async def test_a_key_within_a_time(filled: Filled, begin: int, end: int, expected: list[bytes]) -> None:
    found = await bodies(filled, "all", begin=begin, end=end)
    assert sorted(body for some in found.values() for body in some) == expected


async def test_no_more_than_asked_for_from_each_broker(filled: Filled) -> None:
    assert {name: len(some) for name, some in (await bodies(filled, "all", max_messages=2)).items()} == {
        "broker-a": 2,
        "broker-b": 2,
    }


async def test_a_unique_id_that_was_stored_twice_is_the_older_message(filled: Filled) -> None:
    twice = filled.sent[2]
    async with client_of(filled.cluster.b) as client:
        await client.send(TOPIC, b"a copy", properties={"UNIQ_KEY": twice.message_id})
    assert (await filled.admin.messages.by_unique_key(TOPIC, twice.message_id)).body == b"2"


async def test_what_is_not_there(filled: Filled) -> None:
    somewhere = filled.sent[0].offset_message_id
    with pytest.raises(MessageNotFound):
        await filled.admin.messages.by_offset_id(somewhere[:-4] + "7777")
    with pytest.raises(MessageNotFound, match="no message"):
        await filled.admin.messages.by_unique_key(TOPIC, "F" * 32)
    with pytest.raises(NoRoute):
        await filled.admin.messages.by_key("no-such-topic", "k")


async def test_ids_are_unique_to_a_topic(filled: Filled) -> None:
    (await filled.admin.topics.create(TopicConfig("other", 1, 1), "DefaultCluster")).raise_if_none()
    with pytest.raises(MessageNotFound):
        await filled.admin.messages.by_unique_key("other", filled.sent[0].message_id)


async def test_compressed_bodies_come_back_plain(filled: Filled) -> None:
    body = b"so much of the same " * 1000
    async with AsyncProducer("shop", filled.cluster.namesrv, ProducerConfig(compress_over_bytes=100)) as producer:
        result = await producer.send(Message(TOPIC, body))
    stored = await filled.admin.messages.by_unique_key(TOPIC, result.message_id)
    assert len(stored.body) < len(body)
    assert plain_body(stored) == body


async def test_one_broker_away_is_told_and_the_other_answers(filled: Filled) -> None:
    await filled.cluster.b.server.stop()
    found = await filled.admin.messages.by_key(TOPIC, "all")
    assert [(broker.name, len(messages)) for broker, messages in found.done.items()] == [("broker-a", 3)]
    assert [broker.name for broker in found.failed] == ["broker-b"]
    assert (await filled.admin.messages.by_unique_key(TOPIC, filled.sent[0].message_id)).body == b"0"
    with pytest.raises(MessageNotFound, match=r"broker-b .* could not be asked"):
        await filled.admin.messages.by_unique_key(TOPIC, filled.sent[1].message_id)


async def test_a_query_the_broker_finds_nothing_for_has_its_own_code(filled: Filled) -> None:
    fields = {"topic": TOPIC, "key": "none", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": START * 2}
    async with client_of(filled.cluster.a) as client:
        await client.call(RequestCode.QUERY_MESSAGE, fields, expect=ResponseCode.QUERY_NOT_FOUND)


def test_the_command_line_takes_times_and_shows_bodies() -> None:
    with testing.broker(clock=ManualClock(START)) as mq:
        producer = mq.producer(config=ProducerConfig(compress_over_bytes=100))
        for number in range(3):
            last = producer.send(Message(TOPIC, b"%d" % number * 500, keys="k"))
            mq.advance(1)

        def document(*words: str) -> dict[str, object]:
            result = CliRunner().invoke(app, [*words, "-n", mq.namesrv, "--json"])
            assert result.exit_code == 0, result.output
            found: dict[str, object] = json.loads(result.stdout)
            return found

        def count(*options: str) -> int:
            messages = document("message", "query", TOPIC, "k", *options)["messages"]
            assert isinstance(messages, list)
            return len(messages)

        assert count() == 3
        assert count("--begin", str(START + 1000)) == 2
        assert count("--begin", str(START + 1000), "--end", "2027-01-15T08:00:01.500+00:00") == 1
        assert count("--max", "2") == 2
        assert document("message", "view", last.message_id, "-t", TOPIC)["body"] == "2" * 500
        wrong = CliRunner().invoke(app, ["message", "query", TOPIC, "k", "--begin", "yesterday", "-n", mq.namesrv])
        assert "is not a time" in str(wrong.exception)
