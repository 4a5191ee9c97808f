"""A name server and brokers that answer what a test tells them to, and remember what they were asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from downrange.model.topics import TopicConfig
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.registration import RegisterBrokerBody, RegisterBrokerRequest
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import FrameDecoder
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from downrange.transport.server import Server
from downrange.transport.serving import refuse, serve_commands
from tests.support.golden import scenarios

TOPIC = "orders"
GROUP = "billing"
Answering = Callable[[Command], Command]


def reply(
    code: int = ResponseCode.SUCCESS,
    remark: str | None = None,
    *,
    header: msgspec.Struct | None = None,
    body: msgspec.Struct | bytes = b"",
) -> Answering:
    data = body if isinstance(body, bytes) else encode_body(body)
    return lambda command: command.reply(code, remark, header=header, body=data)


@cache
def captured(scenario: str, code: int, nth: int = 0) -> Command:
    """The `nth` answer the genuine servers gave to a request of this code, and that was no error."""
    asked = {}
    found = []
    for row in scenarios()[f"498-json/{scenario}"]:
        (command,) = FrameDecoder().feed(row.frame)
        if not row.is_response and command.code == code and row.sender == "client":
            asked[row.connection, row.opaque] = True
        elif (
            row.is_response and (row.connection, row.opaque) in asked and not command.code and row.receiver == "client"
        ):
            found.append(command)
    return found[nth]


def mqadmin_sent(scenario: str, code: int, nth: int = 0) -> dict[str, str]:
    """The ext fields of the `nth` request of this code the genuine tool sent, without its signature."""
    found = []
    for row in scenarios()[f"498-json/{scenario}"]:
        (command,) = FrameDecoder().feed(row.frame)
        if not row.is_response and command.code == code and "mqadmin" in row.note and row.sender == "client":
            found.append(command.ext_fields)
    return {name: value for name, value in found[nth].items() if name not in ("AccessKey", "Signature")}


def genuine(scenario: str, code: int, nth: int = 0) -> Answering:
    """Answer as the genuine server did."""
    original = captured(scenario, code, nth)
    return lambda command: command.reply(
        original.code, original.remark, ext_fields=dict(original.ext_fields), body=original.body_bytes
    )


@dataclass
class FakeBroker:
    """Answers the codes it was given answers for; everything else is not supported."""

    name: str
    address: str = ""
    answers: dict[int, Answering] = field(default_factory=dict)
    asked: list[Command] = field(default_factory=list)
    came_by: list[tuple[Connection, int]] = field(default_factory=list)
    """The connection and the code of every request."""

    def __call__(self, command: Command, connection: Connection) -> Command:
        self.asked.append(command)
        self.came_by.append((connection, command.code))
        answering = self.answers.get(command.code)
        return answering(command) if answering else refuse(command, connection)

    def fields(self, code: int) -> list[dict[str, str]]:
        """The ext fields of every request of this code, in order."""
        return [dict(command.ext_fields) for command in self.asked if command.code == code]


@dataclass
class FakeCluster:
    """Name server addresses, brokers by name, and how to make a topic known."""

    namesrv: str
    brokers: dict[str, FakeBroker]
    connections: dict[str, Connection]
    topics: dict[str, TopicConfig] = field(default_factory=dict)
    version: int = 0

    @property
    def broker(self) -> FakeBroker:
        return self.brokers["broker-a"]

    async def register(self, *topics: TopicConfig, on: str | None = None, broker_id: int = 0) -> None:
        """Register topics on one broker, or on all."""
        self.version += 1
        for name in [on] if on else self.brokers:
            body = RegisterBrokerBody(
                topic_config_serialize_wrapper=TopicConfigTable(
                    topic_config_table={topic.topic_name: topic for topic in topics},
                    data_version=DataVersion(counter=self.version, timestamp=self.version),
                )
            )
            header = RegisterBrokerRequest(
                broker_name=name,
                broker_addr=self.brokers[name].address,
                cluster_name="DefaultCluster",
                ha_server_addr="",
                broker_id=broker_id,
            )
            answer = await self.connections[name].request(
                request(RequestCode.REGISTER_BROKER, header, body=encode_body(body)), timeout=5
            )
            assert answer.code == 0, answer.remark


@asynccontextmanager
async def fake_cluster(directory: Path, *names: str) -> AsyncIterator[FakeCluster]:
    """A running cluster whose brokers serve TOPIC and know GROUP."""
    async with AsyncExitStack() as stack:
        config = NamesrvConfig(
            listen_port=0, kv_config_path=directory / "kv.json", config_store_path=directory / "ns.properties"
        )
        namesrv = await stack.enter_async_context(name_server(config))
        address = f"127.0.0.1:{namesrv.port}"
        brokers: dict[str, FakeBroker] = {}
        connections: dict[str, Connection] = {}
        for name in names or ("broker-a",):
            broker = FakeBroker(name)
            server = await stack.enter_async_context(Server(serve_commands(broker)))
            broker.address = f"127.0.0.1:{server.port}"
            brokers[name] = broker
            connections[name] = await connect(address)
        cluster = FakeCluster(address, brokers, connections)
        await cluster.register(
            TopicConfig(TOPIC, 2, 2),
            TopicConfig(f"%RETRY%{GROUP}", 1, 1),
            TopicConfig("TBW102", 8, 8, 7),
            TopicConfig("RMQ_SYS_TRACE_TOPIC", 1, 1),
        )
        yield cluster
        for connection in connections.values():
            await connection.drain(1)
