from __future__ import annotations

import asyncio
import random

import pytest

from downrange.client.brokers import Broker, masters_of, reader_of
from downrange.client.config import ClientConfig, split_addresses
from downrange.client.errors import BrokerNotFound, ClusterNotFound, NoNameServer, NoRoute
from downrange.client.per_server import ask_each
from downrange.client.session import Session
from downrange.clock import ManualClock
from downrange.model.errors import MQError
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.routes import BrokerData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError, ConsumerNotOnline, RequestCodeNotSupported
from downrange.settings import ConfigError
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import split_address
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from tests.unit.client.fake_cluster import TOPIC, FakeCluster

NOBODY = "127.0.0.1:1"


class Unshuffled(random.Random):
    def shuffle(self, x: object) -> None:
        """Keep the order, so that a test knows who is asked first."""


def session_of(*addresses: str, clock: ManualClock | None = None) -> Session:
    return Session(ClientConfig(addresses), clock=clock, random_source=Unshuffled())


# --- configuration ----------------------------------------------------------------------------------------------------


def test_addresses_come_from_the_argument_then_the_environment_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAMESRV_ADDR", "10.0.0.1:9876;10.0.0.2:9876")
    assert ClientConfig.of("a:1").namesrv_addresses == ("a:1",)
    assert ClientConfig.of().namesrv_addresses == ("10.0.0.1:9876", "10.0.0.2:9876")
    assert ClientConfig.of().source == "from NAMESRV_ADDR, set it with -n or NAMESRV_ADDR"
    assert "-n" not in ClientConfig.of("a:1").source, "it was given that way, or by another option"
    monkeypatch.delenv("NAMESRV_ADDR")
    assert ClientConfig.of().namesrv_addresses == ("127.0.0.1:9876",)
    assert ClientConfig.of().source == "the default, set it with -n or NAMESRV_ADDR"


@pytest.mark.parametrize("text", ["", " ; ", "host", "host:", "host:0", "host:70000", ":9876", "host:port"])
def test_an_address_that_cannot_be_one_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        ClientConfig.of(text)


def test_several_addresses_are_separated_by_semicolon_or_comma() -> None:
    assert split_addresses(" a:1 ;b:2,c:3;") == ("a:1", "b:2", "c:3")


def test_a_secret_is_not_shown() -> None:
    config = ClientConfig(("a:1",), access_key="user", secret_key="hidden", security_token="hidden")  # noqa: S106
    assert "hidden" not in repr(config)


# --- name servers -----------------------------------------------------------------------------------------------------


async def test_a_dead_name_server_is_passed_over_and_the_live_one_kept(cluster: FakeCluster) -> None:
    async with session_of(NOBODY, cluster.namesrv) as session:
        assert session.namesrv == NOBODY
        await session.look_up_route(TOPIC)
        assert session.namesrv == cluster.namesrv


async def test_a_kept_connection_that_died_unnoticed_costs_no_answer(cluster: FakeCluster) -> None:
    accepted = 0

    async def die_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """As a name server that was restarted: the first question finds the connection gone."""
        nonlocal accepted
        accepted += 1
        if accepted == 1:
            await reader.read(1)
            writer.transport.abort()
            return
        host, port = split_address(cluster.namesrv)
        its_reader, its_writer = await asyncio.open_connection(host, port)
        its_writer.write(await reader.read(65536))
        writer.write(await its_reader.read(65536))
        await writer.drain()
        its_writer.close()
        writer.close()

    async with await asyncio.start_server(die_once, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with session_of(f"127.0.0.1:{port}") as session:
            assert (await session.look_up_route(TOPIC)).broker_datas
    assert accepted == 2


async def test_when_no_name_server_answers_the_error_names_all_and_where_they_came_from() -> None:
    async with session_of(NOBODY, "127.0.0.1:2") as session:
        with pytest.raises(NoNameServer, match=r"127.0.0.1:1.*127.0.0.1:2.*given in the program") as caught:
            await session.cluster_info()
    assert caught.value.retriable


async def test_an_error_reply_does_not_move_on_to_the_next_name_server(cluster: FakeCluster) -> None:
    async with session_of(cluster.namesrv, NOBODY) as session:
        with pytest.raises(RequestCodeNotSupported):
            await session.ask_namesrv(request(RequestCode.PULL_MESSAGE))
        assert session.namesrv == cluster.namesrv


async def test_sessions_start_with_different_name_servers() -> None:
    addresses = tuple(f"127.0.0.1:{port}" for port in range(1, 9))
    first = {Session(ClientConfig(addresses), random_source=random.Random(seed)).namesrv for seed in range(30)}
    assert len(first) > 3


# --- routes -----------------------------------------------------------------------------------------------------------


async def test_a_route_is_looked_up_once_until_it_is_too_old(cluster: FakeCluster) -> None:
    clock = ManualClock()
    async with session_of(cluster.namesrv, clock=clock) as session:
        assert len((await session.route(TOPIC)).queue_datas) == 2
        await cluster.register(TopicConfig(TOPIC, 9, 9), on="broker-a")
        clock.tick(29)
        assert {data.read_queue_nums for data in (await session.route(TOPIC)).queue_datas} == {2}
        clock.tick(2)
        assert {data.read_queue_nums for data in (await session.route(TOPIC)).queue_datas} == {2, 9}


async def test_a_topic_nobody_serves_has_no_route(cluster: FakeCluster) -> None:
    async with session_of(cluster.namesrv) as session:
        with pytest.raises(NoRoute, match="nothere") as caught:
            await session.route("nothere")
    assert caught.value.topic == "nothere"
    assert caught.value.retriable


# --- brokers ----------------------------------------------------------------------------------------------------------


async def test_an_error_reply_becomes_the_error_of_its_code() -> None:
    def handler(command: Command, connection: Connection) -> Command:
        return command.reply(int(command.ext_fields["code"]), "why")

    async with Server(serve_commands(handler)) as server, session_of(NOBODY) as session:
        address = f"127.0.0.1:{server.port}"

        def asking(code: int) -> Command:
            return request(RequestCode.HEART_BEAT, ext_fields={"code": str(code)})

        assert (await session.invoke(address, asking(0))).remark == "why"
        with pytest.raises(ConsumerNotOnline, match="why"):
            await session.invoke(address, asking(ResponseCode.CONSUMER_NOT_ONLINE))
        with pytest.raises(BrokerError) as caught:
            await session.invoke(address, asking(999))
        assert caught.value.code == 999
        assert (await session.invoke(address, asking(10), accept=(0, 10))).code == 10


async def test_brokers_are_found_by_name_address_and_cluster(cluster: FakeCluster) -> None:
    await cluster.register(on="broker-b", broker_id=1)  # b's address is now that of a slave: it has no master
    address = cluster.broker.address
    async with session_of(cluster.namesrv) as session:
        assert await session.broker(address) == Broker(address)
        assert await session.broker("broker-a") == Broker(address, "broker-a", "DefaultCluster", 0)
        with pytest.raises(BrokerNotFound, match="broker-b has no master"):
            await session.broker("broker-b")
        with pytest.raises(BrokerNotFound, match=r"no broker broker-c; .*broker-a, broker-b"):
            await session.broker("broker-c")
        with pytest.raises(ClusterNotFound, match="DefaultCluster"):
            await session.masters("Other")
        assert [str(broker) for broker in await session.masters()] == [f"broker-a ({address})", "broker-b"]


def test_reading_falls_back_to_the_smallest_slave() -> None:
    data = BrokerData(cluster="c", broker_name="b", broker_addrs={2: "two:1", 1: "one:1"})
    assert reader_of(data).address == "one:1"
    assert masters_of([Broker("one:1", "b", "c", 1), Broker("two:1", "b", "c", 2)]) == [Broker("", "b", "c", 0)]


async def test_outcomes_keep_every_server_with_its_answer_or_its_error() -> None:
    async def ask(server: int) -> str:
        if server % 2:
            raise ConnectFailed(f"no way to {server}")
        return f"hello {server}"

    outcomes = await ask_each([1, 2, 3, 2], ask)
    assert outcomes.done == {2: "hello 2"}
    assert {server: str(error) for server, error in outcomes.failed.items()} == {1: "no way to 1", 3: "no way to 3"}
    outcomes.raise_if_none()
    with pytest.raises(MQError, match="no way to 1"):
        (await ask_each([1, 3], ask)).raise_if_none()


async def test_a_bug_is_not_an_outcome() -> None:
    async def ask(server: int) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ask_each([1], ask)
