"""What a drill does to brokers under a controller, one round of each fault. A round ends when all is well again."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bench.failover_load import TOPIC, FailoverLoad
from downrange.model.errors import MQError
from downrange.protocol.bodies.controller import GetMetadataInfoResponse
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.store.truncation import NOTE
from downrange.transport.connection import Connection
from downrange.transport.pool import connect
from tests.support.controlled_cluster import ControlledCluster
from tests.support.network import Host
from tests.support.process_cluster import Server

QUEUED: Final = 200
_LOOK_SECONDS: Final = 0.02
_ALONE_SECONDS: Final = 0.3
_CUT_SECONDS: Final = 3.0
"""How long a master is cut off that stays master: longer than slaves may lag."""


@dataclass(eq=False)
class Drill:
    """One cluster under load, and what was done to it."""

    cluster: ControlledCluster
    load: FailoverLoad
    stop_seconds: float = 60.0
    queued_acknowledged: list[int] = field(default_factory=list)
    """Sends that lay in the socket of a stopped master and that it acknowledged when it came back."""
    hits: int = 0
    """Rounds in which the fault met the moment that it was meant for."""
    events: list[tuple[str, float]] = field(default_factory=list)
    """What happened in the round, in seconds of `time.monotonic`."""

    def note(self, what: str) -> None:
        self.events.append((what, time.monotonic()))

    async def served_again(self) -> None:
        """Wait until sends are acknowledged again, and a moment longer."""
        await self.load.acknowledges(int(self.load.rate / 2) + 1)

    async def well_again(self) -> None:
        found = await self.cluster.in_sync(len(self.cluster.brokers))
        self.note(f"{len(found.in_sync_replicas)} replicas in sync")
        await self.load.acknowledges(int(self.load.rate / 5) + 1)

    async def controller_leader(self) -> Server:
        async with asyncio.timeout(30):
            while True:
                for controller in self.cluster.controllers:
                    try:
                        asked = request(RequestCode.CONTROLLER_GET_METADATA_INFO)
                        reply = await self.cluster.pool.request(controller.address, asked, 1.0)
                    except MQError:
                        continue
                    if reply.code == 0 and reply.header(GetMetadataInfoResponse).is_leader:
                        return controller
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Note elections meanwhile."""
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()

    async def _watch(self) -> None:
        before = await self.cluster.replicas()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            found = await self.cluster.replicas()
            if found is not None and before is not None and found.master_epoch != before.master_epoch:
                self.note(f"epoch {found.master_epoch} elected")
            before = found or before


async def kill(drill: Drill) -> None:
    master = await drill.cluster.master()
    drill.note("master killed")
    await master.kill()
    await drill.served_again()
    drill.note("old master started")
    await master.start()


async def stop(drill: Drill) -> None:
    """The master stands still with sends in its socket, and goes on when another one was elected long ago."""
    master = await drill.cluster.master()
    connection = await connect(master.address)
    drill.note("master stopped")
    stopped_at = time.monotonic()
    master.stop()
    numbers = [-1 - number - QUEUED * int(stopped_at * 1000) for number in range(QUEUED)]
    queued = [asyncio.create_task(_code(connection, _message(number), drill.stop_seconds + 60)) for number in numbers]
    try:
        await drill.served_again()
        await asyncio.sleep(stopped_at + drill.stop_seconds - time.monotonic())
    finally:
        master.resume()
    drill.note("old master goes on")
    codes = await asyncio.gather(*queued)
    drill.queued_acknowledged += [number for number, code in zip(numbers, codes, strict=True) if code == 0]
    await connection.drain(1)


async def _code(connection: Connection, command: Command, seconds: float) -> int:
    try:
        return (await connection.request(command, seconds)).code
    except MQError:
        return -1


def _message(number: int) -> Command:
    header = SendMessageRequest(producer_group="drill", topic=TOPIC, queue_id=0, born_timestamp=1_700_000_000_000)
    return request(RequestCode.SEND_MESSAGE_V2, header, body=b"%d" % number)


async def etcd_leader(drill: Drill) -> None:
    """etcd loses its leader in the moment in which the master dies."""
    master, node = await drill.cluster.master(), await drill.cluster.etcd.leader()
    drill.note("master and leader of etcd killed")
    await asyncio.gather(master.kill(), asyncio.to_thread(node.kill))
    await drill.served_again()
    drill.cluster.etcd.start(node)
    await drill.cluster.etcd.until_writable()
    drill.note("old master started")
    await master.start()


async def controller_leader(drill: Drill) -> None:
    """The leading controller dies in the moment in which the master dies."""
    master, leader = await drill.cluster.master(), await drill.controller_leader()
    drill.note("master and leading controller killed")
    await asyncio.gather(master.kill(), leader.kill())
    await drill.served_again()
    await leader.start()
    drill.note("old master started")
    await master.start()


async def truncation(drill: Drill) -> None:
    """A master dies with records that nobody else has, and dies again while it cuts them off."""
    cluster, network = drill.cluster, drill.cluster.network
    assert network is not None
    master = await cluster.master()
    for source, target in _slaves(cluster.host_of(master), cluster, master):
        network.cut(source, target)
    drill.note("packets to the slaves lost")
    await asyncio.sleep(_ALONE_SECONDS)  # the master goes on storing meanwhile, and acknowledges nothing
    await master.kill()
    drill.note("master killed")
    await drill.served_again()
    network.heal()
    note = cluster.directory / master.name / NOTE
    starting = asyncio.create_task(master.start())
    drill.hits += await asyncio.to_thread(_kill_on_sight, master, note)
    await asyncio.gather(starting, return_exceptions=True)
    master.close()
    drill.note("old master killed while it cut its log")
    await master.start()


def _kill_on_sight(server: Server, note: os.PathLike[str], seconds: float = 10.0) -> bool:
    """Kill a server when the note of a truncation is there; whether it was seen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.path.exists(note):
            assert server.process is not None
            server.process.signal(9)
            return True
    return False


# --- partitions -------------------------------------------------------------------------------------------------------

Pairs = Callable[[Host, ControlledCluster, Server], list[tuple[Host, Host]]]


def _slaves(master: Host, cluster: ControlledCluster, server: Server) -> list[tuple[Host, Host]]:
    return [(master, cluster.host_of(other)) for other in cluster.brokers if other is not server]


def _controllers(master: Host, cluster: ControlledCluster, server: Server) -> list[tuple[Host, Host]]:
    return [(master, cluster.control)]


def _all(master: Host, cluster: ControlledCluster, server: Server) -> list[tuple[Host, Host]]:
    assert cluster.network is not None
    here = [(master, cluster.network.here)]
    return [*_slaves(master, cluster, server), *_controllers(master, cluster, server), *here]


def partition(
    pairs: Pairs, *, outwards: bool = True, inwards: bool = True, is_deposed: bool = True
) -> Callable[[Drill], Awaitable[None]]:
    """The master loses packets to (`outwards`) or from (`inwards`) some hosts, until somebody acknowledges again."""

    async def cut_and_heal(drill: Drill) -> None:
        cluster, network = drill.cluster, drill.cluster.network
        assert network is not None
        master = await cluster.master()
        drill.note("master cut off")
        for source, target in pairs(cluster.host_of(master), cluster, master):
            if outwards:
                network.cut(source, target)
            if inwards:
                network.cut(target, source)
        try:
            if is_deposed:
                await cluster.master(without=master)
            else:
                await asyncio.sleep(_CUT_SECONDS)
            await drill.served_again()
        finally:
            network.heal()
        drill.note("network whole again")

    return cut_and_heal


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlledFault:
    """One kind of fault, and the cluster that it needs."""

    summary: str
    round: Callable[[Drill], Awaitable[None]]
    rounds: int
    """How many rounds a whole drill has."""
    controllers: int = 2
    etcd_nodes: int = 1
    needs_network: bool = False
    settings: dict[str, object] = field(default_factory=dict)


def _partition(summary: str, pairs: Pairs, rounds: int, **directions: Any) -> ControlledFault:
    return ControlledFault(summary, partition(pairs, **directions), rounds, needs_network=True)


CONTROLLED_FAULTS: Final = {
    "kill": ControlledFault("kill -9 of the master", kill, 200),
    # Without the broker's own refusal of requests that waited too long: the lease alone has to do it.
    "stop": ControlledFault(
        "SIGSTOP of the master, sends in its socket", stop, 100, settings={"brokerFastFailureEnable": "false"}
    ),
    "cut-slaves": _partition("master cut off from its slaves", _slaves, 40, is_deposed=False),
    "cut-controllers": _partition("master cut off from the controllers", _controllers, 40),
    "cut-all": _partition("master cut off from everybody", _all, 40),
    "mute-slaves": _partition("packets of the master to its slaves lost", _slaves, 20, inwards=False, is_deposed=False),
    "deaf-slaves": _partition(
        "packets of its slaves to the master lost", _slaves, 20, outwards=False, is_deposed=False
    ),
    "mute-controllers": _partition("packets of the master to controllers lost", _controllers, 20, inwards=False),
    "deaf-all": _partition("packets of everybody to the master lost", _all, 20, outwards=False),
    "etcd-leader": ControlledFault("kill -9 of master and leader of etcd", etcd_leader, 50, etcd_nodes=3),
    "controller-leader": ControlledFault(
        "kill -9 of master and leading controller", controller_leader, 50, controllers=3
    ),
    "truncation": ControlledFault("kill -9 while a log is cut", truncation, 50, needs_network=True),
}
