"""Other message servers beside ours, in the same run: file persistence, same sizes, same number of messages in flight.

Each is driven in two ways. Ready-made frames over plain sockets, every acknowledgement counted, are faster than any
client library, so what is measured is the server. The usual fast client of each shows what a program gets; ours is
AsyncProducer, with a coroutine for each message and by `send_all`. Two promises about the disk are compared with their
like: written but not yet synced (NATS as it comes, Redis `appendfsync everysec`, ours ASYNC_FLUSH) and synced before
the acknowledgement (Redis `appendfsync always`, RabbitMQ's durable queues with confirms, ours SYNC_FLUSH).
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench import send
from bench.peers import nats, rabbitmq, redis
from bench.peers.clients import Calls, Client, RunningPeer, drive_client
from bench.peers.driver import Peer, PeerFailed, drive
from bench.report import QUICK, Figure, NotMeasured, Row
from bench.served import by_turns, served, target
from downrange.client.producer.producer import AsyncProducer
from downrange.load import LoadReport, SendPlan, send_load
from downrange.load.server_process import ServerProcess
from downrange.model.errors import MQError
from downrange.model.message import Message

OURS: Final = "Downrange"
OUR_CLIENTS: Final = ("AsyncProducer", "AsyncProducer.send_all")
SIZES: Final = (128, 1024)
IN_FLIGHT: Final = (1, 64, 256)
ROUNDS: Final = 1 if QUICK else 2
SECONDS: Final = 0.3 if QUICK else 0.8
WARM_UP_SECONDS: Final = 0.2

Load = Callable[[SendPlan], LoadReport]


class Loads(NamedTuple):
    """A running server, driven in both ways; by each client that was asked for."""

    frames: Load
    clients: tuple[Load, ...]


class Contender(NamedTuple):
    """A server with one promise about the disk."""

    name: str
    is_synced: bool
    clients: tuple[str, ...]
    start: Callable[[], AbstractContextManager[Loads]]
    missing: Callable[[], str]
    """The program that is not installed, if so."""
    client_missing: Callable[[], bool]

    @property
    def by_clients(self) -> tuple[str, ...]:
        return tuple(f"{self.name} by {client}" for client in self.clients)


@contextmanager
def _our_start(flush: str) -> Iterator[Loads]:
    with served({"flushDiskType": flush}) as running:
        frames = target(running)
        topic = target(running).topic

        @asynccontextmanager
        async def produce(namesrv: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
            async with AsyncProducer("bench", namesrv) as producer:
                yield Calls(lambda: producer.send(Message(topic, body)), side_by_side=in_flight)

        @asynccontextmanager
        async def produce_together(namesrv: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
            async with AsyncProducer("bench", namesrv) as producer:

                async def send_all() -> None:
                    for sent in await producer.send_all([Message(topic, body) for _ in range(in_flight)]):
                        if isinstance(sent, MQError):
                            raise sent

                yield Calls(send_all, messages=in_flight)

        found = RunningPeer(running.namesrv, ServerProcess(running.process.pid))
        clients = (
            Client(name, "downrange", way) for name, way in zip(OUR_CLIENTS, (produce, produce_together), strict=True)
        )
        yield Loads(partial(send_load, frames), tuple(partial(drive_client, client, found) for client in clients))


@contextmanager
def _their_start(peer: Peer) -> Iterator[Loads]:
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as directory, peer.start(Path(directory)) as running:

        def frames(plan: SendPlan) -> LoadReport:
            peer.clear(running.address)
            return drive(peer, running, plan)

        def client(plan: SendPlan) -> LoadReport:
            peer.clear(running.address)
            return drive_client(peer.client, running, plan)

        yield Loads(frames, (client,))


def _ours(name: str, is_synced: bool) -> Contender:
    start = partial(_our_start, "SYNC_FLUSH" if is_synced else "ASYNC_FLUSH")
    return Contender(name, is_synced, OUR_CLIENTS, start, lambda: "", lambda: False)


def _theirs(name: str, is_synced: bool, peer: Peer) -> Contender:
    start = partial(_their_start, peer)
    return Contender(
        name, is_synced, (peer.client.name,), start, lambda: peer.program if peer.missing() else "", peer.client.missing
    )


CONTENDERS: Final = (
    _ours(OURS, is_synced=False),
    _theirs("NATS JetStream", is_synced=False, peer=nats.PEER),
    _theirs("Redis Streams", is_synced=False, peer=redis.PEER),
    _ours(f"{OURS} synced", is_synced=True),
    _theirs("Redis Streams synced", is_synced=True, peer=redis.SYNCED_PEER),
    _theirs("RabbitMQ classic synced", is_synced=True, peer=rabbitmq.PEER),
    _theirs("RabbitMQ quorum synced", is_synced=True, peer=rabbitmq.QUORUM_PEER),
)


def _with_bases() -> Iterator[tuple[str, str]]:
    for is_synced in (False, True):
        like = [one for one in CONTENDERS if one.is_synced is is_synced]
        yield from ((one.name, like[0].name) for one in like)
        yield from ((by_client, like[0].by_clients[0]) for one in like for by_client in one.by_clients)


BASES: Final = dict(_with_bases())
"""What is measured, in the order of the table, and what it is compared with: ours, driven and synced alike."""
SERVERS: Final = tuple(BASES)


def figure_name(server: str, size: int, in_flight: int) -> str:
    return f"{server}, {size} B, {in_flight} in flight"


def _plan(size: int, in_flight: int) -> SendPlan:
    connections, outstanding = send.IN_FLIGHT[in_flight]
    return SendPlan(
        SECONDS,
        WARM_UP_SECONDS,
        size,
        connections=connections,
        outstanding=outstanding,
        has_keys=False,
        each_alone=True,  # as the connections to the others are
    )


def run() -> list[Row]:
    rows: list[Row] = []
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        for one in CONTENDERS:
            if program := one.missing():
                rows.append(NotMeasured(one.name, f"{program} is not installed: make bench-peers"))
                continue
            try:
                started = stack.enter_context(one.start())
            except PeerFailed as error:
                rows.append(NotMeasured(one.name, str(error)))
                continue
            loads[one.name] = started.frames
            if one.client_missing():
                rows.append(NotMeasured(one.by_clients[0], f"{one.clients[0]} is not installed: make bench-peers"))
            else:
                loads.update(zip(one.by_clients, started.clients, strict=True))
        names = [name for name in SERVERS if name in loads]
        points = [(name, size, in_flight) for size in SIZES for in_flight in IN_FLIGHT for name in names]
        best = by_turns({figure_name(*point): partial(loads[point[0]], _plan(*point[1:])) for point in points}, ROUNDS)
    for name, size, in_flight in points:
        label, base = figure_name(name, size, in_flight), best[figure_name(BASES[name], size, in_flight)]
        found = best[label]
        rows.append(Figure(label, found.rate, "messages/s", found.rate / base.rate, BASES[name]))
        rows.append(Figure(f"{label}: server CPU", found.server_cpu_micros, "µs a message"))
        rows.append(Figure(f"{label}: client CPU", found.own_cpu_micros, "µs a message"))
        rows.append(Figure(f"{label}: p99", found.latency("reply", "p99"), "ms"))
    return rows
