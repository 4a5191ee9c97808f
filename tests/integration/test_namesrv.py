"""The name server over real sockets: as a process, and in this one where a stopped clock is needed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from downrange.clock import ManualClock
from downrange.model.topics import TopicConfig
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.bodies.registration import RegisterBrokerBody, encode_registration
from downrange.protocol.bodies.routes import ClusterInfo, TopicList, TopicRouteData
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode, ResponseCode, SerializeType
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from downrange.transport.server import Server
from tests.support.golden import Row, scenarios
from tests.support.processes import Running, namesrv, running


def registration(
    name: str,
    address: str,
    *topics: str,
    broker_id: int = 0,
    counter: int = 1,
    compressed: bool = False,
    crc: bool = True,
    kind: SerializeType = SerializeType.JSON,
) -> Command:
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(
            topic_config_table={topic: TopicConfig(topic, 4, 4) for topic in topics},
            data_version=DataVersion(counter=counter, timestamp=1),
        )
    )
    data = encode_registration(body, 409) if compressed else encode_body(body)
    return request(
        RequestCode.REGISTER_BROKER,
        ext_fields={
            "brokerName": name,
            "brokerAddr": address,
            "clusterName": "DefaultCluster",
            "haServerAddr": address + "2",
            "brokerId": str(broker_id),
            "compressed": "true" if compressed else "false",
            "bodyCrc32": str(zlib.crc32(data) & 0x7FFFFFFF) if crc else "0",
        },
        body=data,
        serialize_type=kind,
    )


async def ask(connection: Connection, command: Command, code: int = ResponseCode.SUCCESS) -> Command:
    reply = await connection.request(command, timeout=5)
    assert reply.code == code, reply.remark
    assert reply.serialize_type == command.serialize_type
    return reply


async def route(
    connection: Connection, topic: str, kind: SerializeType = SerializeType.JSON
) -> dict[str, dict[int, str]] | None:
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": topic}, serialize_type=kind)
    reply = await connection.request(command, timeout=5)
    if reply.code == ResponseCode.TOPIC_NOT_EXIST:
        assert (reply.remark or "").startswith(f"No topic route info in name server for the topic: {topic}")
        return None
    found = decode_body(TopicRouteData, reply.body_bytes)
    return {broker.broker_name: broker.broker_addrs for broker in found.broker_datas}


async def test_two_brokers_of_a_name_server_process(tmp_path: Path) -> None:
    with namesrv(tmp_path) as (process, address):
        broker_a, broker_b, client = [await connect(address) for _ in range(3)]
        await ask(broker_a, registration("broker-a", "10.0.0.1:10911", "T", "A"))
        await ask(
            broker_b,
            registration("broker-b", "10.0.0.2:10911", "T", compressed=True, kind=SerializeType.ROCKETMQ),
        )
        both = {"broker-a": {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.2:10911"}}
        assert await route(client, "T") == both
        assert await route(client, "T", SerializeType.ROCKETMQ) == both
        assert await route(client, "unknown") is None
        broker_a.abort()
        async with asyncio.timeout(30):
            while await route(client, "T") == both:
                await asyncio.sleep(0.01)
        assert await route(client, "T", SerializeType.ROCKETMQ) == {"broker-b": {0: "10.0.0.2:10911"}}
        assert await route(client, "A") is None
        assert process.stop() == 0
        await client.wait_closed()


async def test_a_broker_that_repeats_itself_keeps_its_topics_also_after_it_was_away(tmp_path: Path) -> None:
    with namesrv(tmp_path) as (process, address):
        client = await connect(address)
        same = registration("broker-a", "10.0.0.1:10911", "T")
        for _ in range(2):
            broker = await connect(address)
            for _ in range(2):
                await ask(broker, same)
                assert await route(client, "T") == {"broker-a": {0: "10.0.0.1:10911"}}
            broker.abort()
            async with asyncio.timeout(30):
                while await route(client, "T") is not None:
                    await asyncio.sleep(0.01)
        assert process.stop() == 0


def test_a_server_takes_as_many_descriptors_as_the_system_allows(tmp_path: Path) -> None:
    command = f"ulimit -Sn 256; exec {sys.executable} -m downrange.cli.main namesrv --port 0 --data {tmp_path}"
    with closing(Running("-c", command, program=("/bin/sh",))) as process:
        process.wait_for("name server ready")
        limits = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{process.pid}/limits").read_text())
        assert limits is not None
        soft, hard = map(int, limits.groups())
        assert soft == hard > 256


def test_a_port_in_use_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running("namesrv", "--port", str(port), "--data", str(tmp_path)) as process:
            assert process.wait() == 2
            (line,) = process.errors.splitlines()
            assert line.startswith(f"downrange: cannot listen on 127.0.0.1:{port}: ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("listenPort=many", "listenPort=many: expected a whole number from 0 to 65535"),
        ("# fine\nlistenPort=70000", "line 2"),
        ("orderMessageEnabled=true", "unknown key orderMessageEnabled; did you mean orderMessageEnable?"),
        (None, "cannot read configuration file"),
    ],
)
def test_a_bad_configuration_file_is_one_line_and_exit_code_2(tmp_path: Path, text: str | None, complaint: str) -> None:
    file = tmp_path / "namesrv.conf"
    if text is not None:
        file.write_text(text)
    with running("namesrv", "-c", str(file)) as process:
        assert process.wait() == 2
        (line,) = process.errors.splitlines()
        assert line.startswith("downrange: ")
        assert complaint in line


def test_a_rocketmq_configuration_file_works_with_a_warning_for_what_has_no_effect(tmp_path: Path) -> None:
    file = tmp_path / "namesrv.conf"
    file.write_text(f"listenPort=0\nserverWorkerThreads=8\nkvConfigPath={tmp_path}/kv.json\norderMessageEnable=true\n")
    with running("namesrv", "-c", str(file)) as process:
        process.wait_for("name server ready on 127.0.0.1")
        assert "serverWorkerThreads is known to RocketMQ but has no effect here" in process.errors
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_an_address_for_everybody_must_be_asked_for(tmp_path: Path) -> None:
    with running("namesrv", "--bind", "0.0.0.0", "--port", "0", "--data", str(tmp_path)) as process:
        assert process.wait() == 2
        assert "--insecure" in process.errors


async def test_key_value_configuration_survives_a_restart(tmp_path: Path) -> None:
    def put(key: str, value: str) -> Command:
        fields = {"namespace": "ORDER_TOPIC_CONFIG", "key": key, "value": value}
        return request(RequestCode.PUT_KV_CONFIG, ext_fields=fields)

    with namesrv(tmp_path) as (process, address):
        client = await connect(address)
        await ask(client, put("T", "broker-a:4"))
        await ask(client, put("U", "broker-a:2"))
        await ask(
            client,
            request(RequestCode.DELETE_KV_CONFIG, ext_fields={"namespace": "ORDER_TOPIC_CONFIG", "key": "U"}),
        )
        process.kill()
    with namesrv(tmp_path) as (process, address):
        client = await connect(address)
        reply = await ask(client, registration("broker-a", "10.0.0.1:10911", "T"))
        assert decode_body(KVTable, reply.body_bytes).table == {"T": "broker-a:4"}
        process.stop()
    assert msgspec.json.decode((tmp_path / "kvConfig.json").read_bytes()) == {
        "configTable": {"ORDER_TOPIC_CONFIG": {"T": "broker-a:4"}}
    }
    (tmp_path / "kvConfig.json").write_bytes(b"{broken")
    with namesrv(tmp_path) as (process, address):  # the file before it is still there
        process.stop()
    (tmp_path / "kvConfig.json.bak").write_bytes(b"{broken too")
    with running("namesrv", "--port", "0", "--data", str(tmp_path)) as process:
        assert process.wait() == 2
        assert "repair or remove them" in process.errors


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def server(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Server]:
    config = NamesrvConfig(
        listen_port=0, kv_config_path=tmp_path / "kv.json", config_store_path=tmp_path / "ns.properties"
    )
    async with name_server(config, clock) as server:
        yield server


async def client_of(server: Server) -> Connection:
    return await connect(f"127.0.0.1:{server.port}")


async def test_a_silent_broker_expires_and_its_connection_is_closed(server: Server, clock: ManualClock) -> None:
    silent, lively, client = [await client_of(server) for _ in range(3)]
    await ask(silent, registration("broker-a", "10.0.0.1:10911", "T"))
    await ask(lively, registration("broker-b", "10.0.0.2:10911", "T"))
    await clock.advance(110)
    await ask(lively, registration("broker-b", "10.0.0.2:10911", "T"))
    assert len(await route(client, "T") or {}) == 2
    await clock.advance(20)
    assert await route(client, "T") == {"broker-b": {0: "10.0.0.2:10911"}}
    await asyncio.wait_for(silent.wait_closed(), 5)
    for connection in (lively, client):
        await connection.drain(1)


async def test_name_servers_are_independent(server: Server, tmp_path: Path) -> None:
    config = NamesrvConfig(listen_port=0, kv_config_path=tmp_path / "kv2.json", config_store_path=tmp_path / "c2")
    async with name_server(config) as other:
        here, there = await client_of(server), await client_of(other)
        await ask(here, registration("broker-a", "10.0.0.1:10911", "T"))
        assert await route(here, "T") is not None
        assert await route(there, "T") is None
        await here.drain(1)
        await there.drain(1)


async def test_old_clients_get_bare_numeric_keys_and_new_ones_standard_json(server: Server) -> None:
    client = await client_of(server)
    await ask(client, registration("broker-a", "10.0.0.1:10911", "T"))
    for version, fields, expected in (
        (373, {}, b'"brokerAddrs":{0:"10.0.0.1:10911"}'),
        (373, {"acceptStandardJsonOnly": "true"}, b'"brokerAddrs":{"0":"10.0.0.1:10911"}'),
        (409, {}, b'"brokerAddrs":{"0":"10.0.0.1:10911"}'),
    ):
        command = Command(105, raw_ext={"topic": "T", **fields}, version=version)
        assert expected in (await ask(client, command)).body_bytes
    await client.drain(1)


async def test_order_configuration_is_in_the_route_when_enabled(server: Server) -> None:
    client = await client_of(server)
    await ask(client, registration("broker-a", "10.0.0.1:10911", "T"))
    fields = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T", "value": "broker-a:2"}
    await ask(client, request(RequestCode.PUT_KV_CONFIG, ext_fields=fields))
    wanted = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "T"})
    assert decode_body(TopicRouteData, (await ask(client, wanted)).body_bytes).order_topic_conf is None
    await ask(client, request(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"orderMessageEnable=true\n"))
    assert decode_body(TopicRouteData, (await ask(client, wanted)).body_bytes).order_topic_conf == "broker-a:2"
    await client.drain(1)


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"kvConfigPath=/tmp/x", ResponseCode.NO_PERMISSION, "Can not update config in black list."),
        (b"orderMessageEnable=true\nrocketmqHome=/tmp", ResponseCode.NO_PERMISSION, "black list"),
        (b"listenPort=1", ResponseCode.NO_PERMISSION, "listenPort can not be updated while running"),
        (b"orderMessageEnable=maybe", ResponseCode.SYSTEM_ERROR, "orderMessageEnable=maybe: expected true or false"),
        (b"=x", ResponseCode.SYSTEM_ERROR, "not a key=value line"),
        (b"\xff\xfe", ResponseCode.SYSTEM_ERROR, "not UTF-8"),
    ],
)
async def test_configuration_updates_that_are_refused_change_nothing(
    server: Server, tmp_path: Path, body: bytes, code: int, remark: str
) -> None:
    client = await client_of(server)
    before = (await ask(client, request(RequestCode.GET_NAMESRV_CONFIG))).body_bytes
    reply = await client.request(request(RequestCode.UPDATE_NAMESRV_CONFIG, body=body), timeout=5)
    assert reply.code == code
    assert remark in (reply.remark or "")
    assert (await ask(client, request(RequestCode.GET_NAMESRV_CONFIG))).body_bytes == before
    assert os.listdir(tmp_path) == []
    await client.drain(1)


async def test_bad_requests_get_an_error_and_the_connection_goes_on(server: Server) -> None:
    client = await client_of(server)
    for command, complaint in (
        (request(RequestCode.REGISTER_BROKER, ext_fields={"brokerName": "b"}), "missing required field"),
        (registration("b", "1.1.1.1:1", crc=True), None),
        (request(RequestCode.QUERY_DATA_VERSION, ext_fields={"brokerName": "b"}), "missing required field"),
        (request(RequestCode.PUT_KV_CONFIG, ext_fields={"namespace": "n"}), "namespace or key is null"),
    ):
        reply = await client.request(command, timeout=5)
        if complaint is None:
            assert reply.code == 0
        else:
            assert reply.code == ResponseCode.SYSTEM_ERROR
            assert complaint in (reply.remark or "")
    damaged = registration("b", "1.1.1.1:1", "T")
    fields = {**damaged.ext_fields, "bodyCrc32": "12345"}
    reply = await client.request(request(103, ext_fields=fields, body=damaged.body), timeout=5)
    assert (reply.code, reply.remark) == (ResponseCode.SYSTEM_ERROR, "crc32 not match")
    bomb = zlib.compress(bytes(200 * 1024 * 1024), 9)
    fields = {**damaged.ext_fields, "bodyCrc32": "0", "compressed": "true"}
    reply = await client.request(request(103, ext_fields=fields, body=bomb), timeout=10)
    assert "inflates to more than" in (reply.remark or "")
    reply = await client.request(request(12345), timeout=5)
    assert (reply.code, reply.remark) == (3, " request type 12345 not supported")
    await client.drain(1)


# --- what the genuine name server answered, asked again ----------------------------------------------------------

REPLAYED = ["498-json/kv_config", "498-json/route_query", "498-json/wrong_requests", "498-binary/route_query"]
REPLAYED += ["498-json/broker_register_compressed", "498-json/cluster_admin", "498-json/topic_admin"]
# Asked of a 4.9.8 server that had more topics than the registration replayed here: the number differs, the field not.
COUNTS = {"wipeTopicCount", "addTopicCount"}


def conversation(name: str) -> list[tuple[Row, Row]]:
    """The requests to the name server with their answers."""
    waiting: dict[tuple[int, int], Row] = {}
    pairs = []
    for row in scenarios()[name]:
        if row.receiver == "namesrv" and not row.is_response:
            waiting[row.connection, row.opaque] = row
        elif row.sender == "namesrv" and row.is_response:
            pairs.append((waiting[row.connection, row.opaque], row))
    return pairs


def command_of(row: Row) -> Command:
    from downrange.protocol.framing import FrameDecoder

    (command,) = FrameDecoder().feed(row.frame)
    return command


@pytest.mark.parametrize("name", REPLAYED)
async def test_captured_requests_get_the_answers_of_the_genuine_name_server(server: Server, name: str) -> None:
    client = await client_of(server)
    first = next(row for row in scenarios()["498-json/broker_register"] if row.code == RequestCode.REGISTER_BROKER)
    await client.request(command_of(first), timeout=5)
    created = {"gsTopicA", "gsTopicRetry", "gsTopicReq"}  # made earlier in the captured run
    await ask(client, registration("broker-a", "10.0.0.1:40911", *created, counter=99))
    compared = 0
    for asked, answered in conversation(name):
        question, expected = command_of(asked), command_of(answered)
        reply = await client.request(question, timeout=5)
        if question.code == RequestCode.GET_ROUTEINFO_BY_TOPIC and reply.code != expected.code:
            continue  # a topic that other steps of the captured run made or deleted on the broker
        compared += 1
        assert reply.code == expected.code, asked.place
        assert reply.serialize_type == expected.serialize_type, asked.place
        assert set(reply.ext_fields) == set(expected.ext_fields), asked.place
        for field, value in expected.ext_fields.items():
            if field not in COUNTS:
                assert reply.ext_fields[field] == value, asked.place
        if expected.code != 0:
            assert reply.remark == expected.remark, asked.place
        assert bool(reply.body) == bool(expected.body), asked.place
        compare_bodies(question.code, reply.body_bytes, expected.body_bytes, asked.place)
    assert compared > 0
    await client.drain(1)


def compare_bodies(code: int, ours: bytes, theirs: bytes, place: str) -> None:
    if not theirs:
        return
    if code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
        found, wanted = decode_body(TopicRouteData, ours), decode_body(TopicRouteData, theirs)
        assert found.broker_datas == wanted.broker_datas, place
        assert [queue.broker_name for queue in found.queue_datas] == [queue.broker_name for queue in wanted.queue_datas]
    elif code == RequestCode.GET_BROKER_CLUSTER_INFO:
        assert decode_body(ClusterInfo, ours) == decode_body(ClusterInfo, theirs), place
    elif code == RequestCode.GET_KVLIST_BY_NAMESPACE:
        assert decode_body(KVTable, ours) == decode_body(KVTable, theirs), place
    elif code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
        assert decode_body(TopicList, ours).topic_list, place
