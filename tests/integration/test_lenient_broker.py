"""Requests that genuine brokers answer although clients left something out, and answers in Java's own form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from downrange.broker.app import RunningBroker
from downrange.model.topics import retry_topic
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.routes import TopicList
from downrange.protocol.codes import RequestCode, ResponseCode
from tests.support.broker_client import BrokerClient, client_of, everything, standalone
from tests.support.requests import connected

PULL = {"topic": "T", "queueId": 0, "queueOffset": 0, "maxMsgNums": 32, "sysFlag": 4, "subscription": "*"}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with standalone(tmp_path) as running:
        yield running


@pytest.fixture
async def client(broker: RunningBroker) -> AsyncIterator[BrokerClient]:
    async with client_of(broker) as found:
        await found.send("T", b"first")
        yield found


async def test_numbers_that_a_pull_lacks_count_as_zero(client: BrokerClient) -> None:
    reply = await client.call(RequestCode.PULL_MESSAGE, {**PULL, "consumerGroup": "g"})
    assert b"first" in reply.body_bytes


async def test_a_pull_without_a_group_is_answered_and_makes_none(client: BrokerClient, broker: RunningBroker) -> None:
    reply = await client.call(RequestCode.PULL_MESSAGE, {**PULL, "consumerGroup": ""})
    assert b"first" in reply.body_bytes
    table = await client.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    assert b'"":' not in table.body_bytes


async def test_a_send_needs_no_producer_group(client: BrokerClient) -> None:
    fields = {"b": "T", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 1, "h": 0, "i": "", "j": 0, "k": False}
    reply = await client.call(RequestCode.SEND_MESSAGE_V2, fields, body=b"second")
    assert reply.ext_fields["queueOffset"] == "1"


async def test_heartbeats_and_farewells_may_be_empty(client: BrokerClient) -> None:
    await client.call(RequestCode.HEART_BEAT, body=b"{}")
    await client.call(RequestCode.UNREGISTER_CLIENT)


async def test_a_route_request_without_a_topic_finds_none(broker: RunningBroker) -> None:
    async with connected(broker.config.broker.namesrv_addresses[0]) as namesrv:
        await namesrv.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, expect=ResponseCode.TOPIC_NOT_EXIST)


async def test_a_message_for_the_retry_topic_of_an_unknown_group_is_stored(client: BrokerClient) -> None:
    await client.send(retry_topic("never-seen"), b"again")
    messages, _ = await client.pull(retry_topic("never-seen"), group="never-seen")
    assert [message.body for message in messages] == [b"again"]


@pytest.mark.parametrize(("tags", "code"), [("|| ||", ResponseCode.PULL_RETRY_IMMEDIATELY), ("||", 23), ("*", 0)])
async def test_a_subscription_without_tags_matches_nothing(client: BrokerClient, tags: str, code: int) -> None:
    await client.ask(client.pull_command("T", tags=tags), code)


async def test_queues_are_keys_in_java_s_form(client: BrokerClient) -> None:
    await client.heartbeat(consume={"g": [everything("T")]})
    fields = {"consumerGroup": "g", "topic": "T", "queueId": 0, "commitOffset": 1}
    await client.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
    key = b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:'
    stats = await client.call(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
    assert stats.body_bytes.startswith(key)
    progress = await client.call(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
    assert key.removeprefix(b"{") in progress.body_bytes


async def test_the_half_topic_is_listed_from_the_start(broker: RunningBroker) -> None:
    async with connected(broker.config.broker.namesrv_addresses[0]) as namesrv:
        reply = await namesrv.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        assert "RMQ_SYS_TRANS_HALF_TOPIC" in decode_body(TopicList, reply.body_bytes).topic_list


async def test_an_empty_broker_has_no_earliest_message(broker: RunningBroker) -> None:
    async with client_of(broker) as client:
        before = await client.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert b'"earliestMessageTimeStamp":"-1"' in before.body_bytes
        await client.send("T", b"first")
        after = await client.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        assert b'"earliestMessageTimeStamp":"-1"' not in after.body_bytes
