"""Automatic failover with real processes: etcd, controllers, three brokers of one name, a name server."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from downrange.client.producer.blocking.producer import Producer
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.send_result import SendStatus
from downrange.model.message import Message
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.groups import SubscriptionGroupTable
from downrange.protocol.bodies.pop import MessageRequestMode, MessageRequestModes
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode
from downrange.transport.pool import connect
from tests.support.controlled_cluster import ControlledCluster, Sender, controlled_cluster
from tests.support.requests import connected, create_topic, wait_for_route

TOPIC = "Orders"


async def sender(cluster: ControlledCluster) -> Sender:
    async with connected((await cluster.master()).address) as client:
        await create_topic(client, TOPIC, 4)
    return Sender(cluster, TOPIC)


async def nothing_is_lost(cluster: ControlledCluster, sent: Sender) -> None:
    """Every acknowledged message is on the master, once, and all logs have the same bytes."""
    await cluster.in_sync(3)
    stored = await sent.stored(await cluster.master())
    assert sent.acknowledged <= stored.keys()
    assert {number: times for number, times in stored.items() if times > 1} == {}
    await cluster.logs_are_equal()


async def test_a_master_that_is_killed_is_replaced_and_returns(tmp_path: Path) -> None:
    async with controlled_cluster(tmp_path) as cluster:
        sent = await sender(cluster)
        async with sent.sending():
            await sent.acknowledges(300)
            killed = await cluster.master()
            await killed.kill()
            await cluster.master(without=killed)
            await sent.acknowledges(300)
            await killed.start()
            await cluster.in_sync(3)
            await sent.acknowledges(100)
        assert sent.longest_gap < 10
        await nothing_is_lost(cluster, sent)


async def test_a_master_that_hangs_acknowledges_nothing_when_it_comes_back(tmp_path: Path) -> None:
    # Without the broker's own refusal of requests that waited too long: the lease alone has to do it.
    async with controlled_cluster(tmp_path, settings={"brokerFastFailureEnable": "false"}) as cluster:
        sent = await sender(cluster)
        async with sent.sending():
            await sent.acknowledges(200)
            hung = await cluster.master()
            connection = await connect(hung.address)
            hung.stop()
            queued = [asyncio.create_task(connection.request(sent.message(-n), 60)) for n in range(1, 201)]
            await cluster.master(without=hung)
            await sent.acknowledges(200)
            hung.resume()
            codes = Counter([(await reply).code for reply in queued])
            await cluster.in_sync(3)
        assert codes[0] == 0, codes
        await connection.drain(1)
        await nothing_is_lost(cluster, sent)


async def test_sends_leave_a_master_that_hangs_when_another_was_elected(tmp_path: Path) -> None:
    async with controlled_cluster(tmp_path) as cluster:
        hung = await cluster.master()
        async with connected(hung.address) as client:
            await create_topic(client, TOPIC, 4)
        async with connected(cluster.namesrv.address) as names:
            await wait_for_route(names, TOPIC)
        async with AsyncProducer("producers", cluster.namesrv.address) as producer:
            with Producer("producers", cluster.namesrv.address) as blocking:
                for _ in range(8):
                    await producer.send(Message(TOPIC, b"before"))
                    await asyncio.to_thread(blocking.send, Message(TOPIC, b"before"))
                hung.stop()
                # One attempt may last as long as the send: without news of the new master both would fail.
                sends = (
                    producer.send(Message(TOPIC, b"after"), timeout=60),
                    asyncio.to_thread(blocking.send, Message(TOPIC, b"after"), timeout=60),
                )
                results = await asyncio.gather(*sends)
                assert [result.status for result in results] == [SendStatus.SEND_OK] * 2
                hung.resume()


async def test_what_was_made_just_before_the_end_is_there_after_it(tmp_path: Path) -> None:
    async with controlled_cluster(tmp_path) as cluster:
        old = await cluster.master()
        async with connected(old.address) as client:
            await create_topic(client, "JustMade", 7)
            await client.call(
                RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=b'{"groupName":"JustMade","consumeEnable":true}'
            )
            mode = MessageRequestMode(topic="JustMade", consumer_group="JustMade", mode="POP", pop_share_queue_num=1)
            await client.call(RequestCode.SET_MESSAGE_REQUEST_MODE, body=encode_body(mode))
        await old.kill()
        new = await cluster.master(without=old)
        async with connected(new.address) as client:
            topics = decode_body(
                TopicConfigTable, (await client.call(RequestCode.GET_ALL_TOPIC_CONFIG)).body_bytes
            ).topic_config_table
            groups = decode_body(
                SubscriptionGroupTable, (await client.call(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)).body_bytes
            ).subscription_group_table
            modes = decode_body(
                MessageRequestModes, (await client.call(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)).body_bytes
            ).message_request_mode_map
        assert modes == {"JustMade": {"JustMade": mode}}
        assert topics["JustMade"].write_queue_nums == 7
        assert "JustMade" in groups
