"""How a producer finds its queues, and how its session keeps routes and brokers up to date."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import NoNameServer, NoRoute
from downrange.client.namespace import unwrap, wrap
from downrange.client.producer.producer import AsyncProducer
from downrange.client.producer.publish_info import publish_info, route_from_model
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.message import Message, MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import HeartbeatData, ProducerData
from downrange.protocol.bodies.routes import BrokerData, QueueData, TopicRouteData
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.settings import ConfigError
from downrange.transport.connection import Connection
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.unit.client.fake_cluster import TOPIC, FakeCluster
from tests.unit.client.scripted import (
    Silence,
    answer_sends,
    producer_of,
    route_of,
    scripted_namesrv,
    sends,
    stored,
    until,
)

MESSAGE = Message(TOPIC, b"body")
NOBODY = "127.0.0.1:1"


# --- route -> queues --------------------------------------------------------------------------------------------------


def test_queues_are_sorted_by_broker_and_only_those_that_may_be_written() -> None:
    route = TopicRouteData(
        broker_datas=(
            BrokerData(cluster="C", broker_name="b", broker_addrs={0: "b:1"}),
            BrokerData(cluster="C", broker_name="a", broker_addrs={0: "a:1", 1: "a:2"}),
            BrokerData(cluster="C", broker_name="slave-only", broker_addrs={1: "s:1"}),
            BrokerData(cluster="C", broker_name="read-only", broker_addrs={0: "r:1"}),
        ),
        queue_datas=(
            QueueData(broker_name="b", read_queue_nums=9, write_queue_nums=1, perm=6),
            QueueData(broker_name="a", read_queue_nums=9, write_queue_nums=2, perm=2),
            QueueData(broker_name="slave-only", read_queue_nums=4, write_queue_nums=4, perm=6),
            QueueData(broker_name="read-only", read_queue_nums=4, write_queue_nums=4, perm=4),
        ),
    )
    info = publish_info("T", route)
    assert info.queues == (MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("T", "b", 0))
    assert info.brokers == ("a", "b")
    assert info.addresses["a"] == "a:1"


def test_an_ordered_topic_keeps_its_queues_while_a_broker_is_away() -> None:
    route = TopicRouteData(
        broker_datas=(BrokerData(cluster="C", broker_name="a", broker_addrs={0: "a:1"}),),
        queue_datas=(QueueData(broker_name="a", read_queue_nums=8, write_queue_nums=8, perm=6),),
        order_topic_conf="a:2;b:1; ;nonsense",
    )
    info = publish_info("T", route)
    assert info.is_ordered
    assert [queue[1:] for queue in info.queues] == [("a", 0), ("a", 1), ("b", 0)]


@pytest.mark.parametrize(
    ("route", "why"),
    [(TopicRouteData(), "no broker permits"), (route_of({"a": "a:1"}, perm=4), "no broker permits")],
)
def test_without_a_writable_queue_there_is_no_route(route: TopicRouteData, why: str) -> None:
    with pytest.raises(NoRoute, match=why):
        publish_info("T", route)


def test_a_broker_without_master_is_named() -> None:
    route = TopicRouteData(
        broker_datas=(BrokerData(cluster="C", broker_name="a", broker_addrs={1: "a:2"}),),
        queue_datas=(QueueData(broker_name="a", read_queue_nums=8, write_queue_nums=8, perm=6),),
    )
    with pytest.raises(NoRoute, match="a: no master"):
        publish_info("T", route)


def test_a_topic_to_be_made_gets_few_queues() -> None:
    (data,) = route_from_model(route_of({"a": "a:1"}, queues=8, perm=7), 4).queue_datas
    assert (data.read_queue_nums, data.write_queue_nums) == (4, 4)
    (data,) = route_from_model(route_of({"a": "a:1"}, queues=2, perm=7), 4).queue_datas
    assert (data.read_queue_nums, data.write_queue_nums) == (2, 2)


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("orders", "ns%orders"),
        ("ns%orders", "ns%orders"),
        ("%RETRY%group", "%RETRY%ns%group"),
        ("%DLQ%ns%group", "%DLQ%ns%group"),
        ("RMQ_SYS_TRACE_TOPIC", "RMQ_SYS_TRACE_TOPIC"),
        ("rmq_sys_x", "rmq_sys_x"),
        ("TOOLS_CONSUMER", "TOOLS_CONSUMER"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
    ],
)
def test_names_get_their_namespace_once(name: str, wire: str) -> None:
    assert wrap("ns", name) == wire
    assert wrap("", name) == name
    assert wrap("ns", unwrap("ns", wire)) == wire
    assert unwrap("ns", "ns%orders") == "orders"


# --- looking up -------------------------------------------------------------------------------------------------------


async def test_no_route_no_name_server_and_no_address_are_three_errors(cluster: FakeCluster) -> None:
    async with scripted_namesrv() as (namesrv, _), producer_of(namesrv.address) as producer:
        with pytest.raises(NoRoute, match="orders") as no_route:
            await producer.send(MESSAGE)
        assert no_route.value.code == 10005
        assert namesrv.asked == ["orders", "TBW102"]
    async with producer_of(NOBODY) as producer:
        with pytest.raises(NoNameServer, match=NOBODY) as no_server:
            await producer.send(MESSAGE)
        assert no_server.value.code == 10004
    with pytest.raises(ConfigError, match="no name server address"):
        AsyncProducer("producers", "")


async def test_a_topic_that_does_not_exist_is_sent_to_the_brokers_of_the_auto_create_topic(
    cluster: FakeCluster,
) -> None:
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv) as producer:
        await asyncio.gather(*(producer.send(Message("brand-new", b"x")) for _ in range(40)))
        assert len(await producer.queues("brand-new")) == 8
    requests = [header for broker in cluster.brokers.values() for header in sends(broker)]
    assert len(requests) == 40
    assert {(header.topic, header.default_topic, header.default_topic_queue_nums) for header in requests} == {
        ("brand-new", "TBW102", 4)
    }
    assert {header.queue_id for header in requests} == {0, 1, 2, 3}


async def test_many_first_sends_look_the_route_up_once(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with scripted_namesrv(broker_a=cluster.broker.address) as (namesrv, _):
        async with producer_of(namesrv.address) as producer:
            await asyncio.gather(*(producer.send(MESSAGE) for _ in range(64)))
        assert namesrv.asked == ["orders"]


async def test_waiting_for_a_look_up_has_an_end(cluster: FakeCluster) -> None:
    async with scripted_namesrv() as (namesrv, _):
        namesrv.silence = Silence()
        config = ClientConfig((namesrv.address,), route_lock_seconds=0.05)
        async with AsyncProducer("producers", config) as producer:
            first = asyncio.create_task(producer.send(MESSAGE, timeout=0.3))
            await until(lambda: namesrv.asked)
            with pytest.raises(NoNameServer, match=r"more than 0.05 s"):
                await producer.send(MESSAGE)
            with pytest.raises(NoNameServer, match="within the time of the send"):
                await first
        namesrv.silence.end()


async def test_routes_are_refreshed_every_30_seconds(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    clock = ManualClock()
    producer = producer_of(cluster.namesrv, clock=clock)
    async with producer.session, producer:
        assert len(await producer.queues(TOPIC)) == 4
        await cluster.register(TopicConfig(TOPIC, 5, 5), on="broker-a")
        await clock.advance(29)
        assert len(await producer.queues(TOPIC)) == 4
        before = producer.session.known_route(TOPIC)
        await clock.advance(2)
        await until(lambda: producer.session.known_route(TOPIC) is not before)
        assert len(await producer.queues(TOPIC)) == 7


async def test_a_failed_send_has_the_route_looked_up_soon(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    config = ProducerConfig(fault_strategy="round_robin")
    async with (
        scripted_namesrv(broker_a=NOBODY) as (namesrv, _),
        producer_of(namesrv.address, config=config) as producer,
    ):
        with pytest.raises(Exception, match="3 attempts"):
            await producer.send(MESSAGE)
        namesrv.routes["orders"] = route_of({"broker_a": cluster.broker.address})
        await until(lambda: len(namesrv.asked) >= 2)
        await until(lambda: producer.session.known_route(TOPIC) == namesrv.routes["orders"])
        await producer.send(MESSAGE)


async def test_a_topic_its_name_server_forgot_keeps_its_last_route(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    address = cluster.broker.address
    async with scripted_namesrv(broker_a=address) as (namesrv, _), producer_of(namesrv.address) as producer:
        await producer.send(MESSAGE)
        namesrv.routes.clear()
        await producer.session.refresh_followed()
        assert namesrv.asked == ["orders", "orders"]
        await producer.send(MESSAGE)


async def test_a_topic_that_lost_its_last_writable_queue_is_looked_up_with_every_send(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    addresses = {"broker_a": cluster.broker.address}
    async with scripted_namesrv(**addresses) as (namesrv, _), producer_of(namesrv.address) as producer:
        await producer.send(MESSAGE)
        namesrv.routes["orders"] = route_of(addresses, perm=4)
        await producer.session.refresh_followed()
        with pytest.raises(NoRoute, match="no broker permits"):
            await producer.send(MESSAGE)
        namesrv.routes["orders"] = route_of(addresses)
        await producer.send(MESSAGE)


# --- heartbeats and brokers -------------------------------------------------------------------------------------------


def beats(cluster: FakeCluster, name: str = "broker-a") -> list[HeartbeatData]:
    return [
        decode_body(HeartbeatData, command.body_bytes)
        for command in cluster.brokers[name].asked
        if command.code == RequestCode.HEART_BEAT
    ]


async def test_masters_hear_of_the_group_at_once_and_every_30_seconds_until_it_leaves(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    clock = ManualClock()
    config = ProducerConfig(fault_strategy="round_robin")  # without probes, which would sleep on the clock, too
    producer = producer_of(cluster.namesrv, clock=clock, config=config)
    async with producer.session:
        async with producer:
            await producer.send(MESSAGE)
            await until(
                lambda: beats(cluster) and beats(cluster, "broker-b") and clock.sleeping.count(30) == 2
            )  # and routes
            assert beats(cluster)[-1].producer_data_set == (ProducerData("producers"),)
            assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+@\d+#\d+", beats(cluster)[-1].client_id)
            heard = len(beats(cluster))
            await clock.advance(29)
            assert len(beats(cluster)) == heard
            await clock.advance(2)
            await until(lambda: len(beats(cluster)) == heard + 1)
        left = cluster.broker.fields(RequestCode.UNREGISTER_CLIENT)
        assert left == [{"clientID": producer.session.client_id, "producerGroup": "producers"}]


async def test_two_producers_of_a_session_share_a_beat_and_the_last_one_leaves(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with Session(ClientConfig((cluster.namesrv,))) as session:
        async with AsyncProducer("one", session=session) as one, AsyncProducer("two", session=session) as two:
            async with AsyncProducer("one", session=session) as again:
                await asyncio.gather(*(producer.send(MESSAGE) for producer in (one, two, again)))
                await session.heartbeats.beat()
                assert beats(cluster)[-1].producer_data_set == (ProducerData("one"), ProducerData("two"))
            assert cluster.broker.fields(RequestCode.UNREGISTER_CLIENT) == []
        left = [fields["producerGroup"] for fields in cluster.broker.fields(RequestCode.UNREGISTER_CLIENT)]
        assert sorted(left) == ["one", "two"]
        assert session.client_id != Session(session.config).client_id


async def test_a_broker_no_route_names_any_more_is_disconnected(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)

    def handler(command: Command, connection: Connection) -> Command:
        return stored(command) if command.code == RequestCode.SEND_MESSAGE_V2 else command.reply()

    async with Server(serve_commands(handler)) as server:
        old = f"127.0.0.1:{server.port}"
        async with scripted_namesrv(broker_a=old) as (namesrv, _), producer_of(namesrv.address) as producer:
            await producer.send(MESSAGE)
            assert len(server.connections) == 1
            namesrv.routes["orders"] = route_of({"broker_b": cluster.broker.address})
            await producer.session.refresh_followed()
            await until(lambda: not server.connections)
            assert producer.session.addresses_in_use() == {cluster.broker.address}


async def test_requests_of_brokers_are_answered_from_the_table() -> None:
    connections: list[Connection] = []

    def handler(command: Command, connection: Connection) -> Command:
        connections.append(connection)
        return command.reply()

    async with Server(serve_commands(handler)) as server, Session(ClientConfig((NOBODY,))) as session:
        session.handlers[RequestCode.CHECK_TRANSACTION_STATE] = lambda command, connection: command.reply(remark="mine")
        await session.invoke(f"127.0.0.1:{server.port}", request(RequestCode.HEART_BEAT))
        answer = await connections[0].request(request(RequestCode.CHECK_TRANSACTION_STATE), 5)
        assert answer.remark == "mine"
        refused = await connections[0].request(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED), 5)
        assert "not supported" in (refused.remark or "")


async def test_a_broken_background_task_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(ManualClock):
        async def sleep(self, seconds: float) -> None:
            raise RuntimeError("no time")

    async with Session(ClientConfig((NOBODY,)), clock=Broken()) as session:
        session.start()
        await until(lambda: "no time" in caplog.text)
