"""Brokers that answer sends as a test tells them to, and a name server that knows nothing but one route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import isclose
from typing import Any, cast

from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.producer.producer import AsyncProducer
from downrange.client.session import Session
from downrange.clock import Clock, ManualClock
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.routes import BrokerData, QueueData, TopicRouteData
from downrange.protocol.bodies.send import SendMessageRequest, SendMessageResponse
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.server import Server
from downrange.transport.serving import LaterReply, serve_commands
from tests.unit.client.fake_cluster import Answering, FakeBroker, FakeCluster, reply

SEND = RequestCode.SEND_MESSAGE_V2
BATCH = RequestCode.SEND_BATCH_MESSAGE


def stored(command: Command) -> Command:
    """As a broker that stored the message answers."""
    header = command.header(SendMessageRequest)
    return command.reply(
        header=SendMessageResponse(msg_id="0A00000100002A9F00000000000003E8", queue_id=header.queue_id, queue_offset=7)
    )


def stored_with(code: int) -> Answering:
    """Stored, but not as safely as the settings promise."""
    return lambda command: command.reply(code, ext_fields=dict(stored(command).ext_fields))


class Silence:
    """An answer that never comes. `end` lets the server stop at once."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Command | None]] = []

    def __call__(self, command: Command) -> Command:
        future: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        return cast(Command, future)  # a handler may answer later; only FakeBroker's type does not know it

    def end(self) -> None:
        for future in self.waiting:
            future.cancel()


def answer_sends(cluster: FakeCluster, answering: Answering, *names: str) -> None:
    """What the brokers of these names, or all, answer to sends; heartbeats are always welcome."""
    for name in names or cluster.brokers:
        cluster.brokers[name].answers.update(
            {
                SEND: answering,
                BATCH: answering,
                RequestCode.HEART_BEAT: reply(),
                RequestCode.UNREGISTER_CLIENT: reply(),
                RequestCode.GET_MAX_OFFSET: lambda command: command.reply(ext_fields={"offset": "0"}),
            }
        )


def in_turn(*answers: Answering) -> Answering:
    """The first answer to the first request, wherever it goes, and so on; the last one for all that follow."""
    left = list(answers)

    def answering(command: Command) -> Command:
        return (left.pop(0) if len(left) > 1 else left[0])(command)

    return answering


def sends(broker: FakeBroker) -> list[SendMessageRequest]:
    return [command.header(SendMessageRequest) for command in broker.asked if command.code in (SEND, BATCH)]


def where_sends_went(cluster: FakeCluster) -> dict[str, int]:
    return {name: len(sends(broker)) for name, broker in cluster.brokers.items()}


def producer_of(
    namesrv: str, *, clock: Clock | None = None, config: ProducerConfig | None = None, **options: Any
) -> AsyncProducer:
    """A producer whose route refreshes and heartbeats run on `clock`."""
    settings = ClientConfig((namesrv,))
    producer = AsyncProducer("producers", settings, config, **options)
    if clock is not None:
        producer = AsyncProducer("producers", config=config, session=Session(settings, clock=clock), **options)
    return producer


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def sleeping(clock: ManualClock, seconds: float) -> None:
    """Let the loop run until somebody sleeps for just so long: only then it is time to move the clock."""
    await until(lambda: any(isclose(left, seconds) for left in clock.sleeping))


def route_of(addresses: dict[str, str], queues: int = 4, perm: int = 6) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=tuple(
            BrokerData(cluster="DefaultCluster", broker_name=name, broker_addrs={0: address})
            for name, address in addresses.items()
        ),
        queue_datas=tuple(
            QueueData(broker_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
            for name in addresses
        ),
    )


class ScriptedNamesrv:
    """Answers route requests from `routes`, remembers the topics asked for, and is silent while told to be."""

    def __init__(self) -> None:
        self.routes: dict[str, TopicRouteData] = {}
        self.asked: list[str] = []
        self.silence: Silence | None = None
        self.address = ""

    def __call__(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        if command.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        topic = command.ext_fields["topic"]
        self.asked.append(topic)
        if self.silence is not None:
            return self.silence(command)
        route = self.routes.get(topic)
        if route is None:
            return command.reply(ResponseCode.TOPIC_NOT_EXIST, f"No topic route info in name server for {topic}")
        return command.reply(body=encode_body(route))


@asynccontextmanager
async def scripted_namesrv(**addresses: str) -> AsyncIterator[tuple[ScriptedNamesrv, Server]]:
    """A name server that knows the topic `orders` on these brokers; the server, so that a test can stop it."""
    namesrv = ScriptedNamesrv()
    if addresses:
        namesrv.routes["orders"] = route_of(addresses)
    async with Server(serve_commands(namesrv), limits=Limits(drain_seconds=0.2)) as server:
        namesrv.address = f"127.0.0.1:{server.port}"
        yield namesrv, server
