"""Three brokers of one name under controllers, as real processes with etcd and a name server, for drills to break."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import monotonic

from downrange.model.errors import MQError
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.controller import (
    BrokerReplicasInfo,
    EpochEntryCache,
    ReplicasInfo,
    encode_broker_names,
)
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.bodies.send import SendMessageRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.transport.pool import Pool
from tests.support.etcd import HERE, EtcdCluster, etcd
from tests.support.lasting_port import lasting_port
from tests.support.network import Host, Network
from tests.support.process_cluster import Server
from tests.support.processes import DOWNRANGE
from tests.support.replica_processes import log_of
from tests.support.requests import connected, drain

BROKER = "broker-a"
FILE_SIZE = 4 << 20
SECONDS = 40.0


@dataclass
class ControlledCluster:
    """Holds always: the data of a broker are in the directory of its name in `directory`."""

    directory: Path
    etcd: EtcdCluster
    namesrv: Server
    controllers: list[Server] = field(default_factory=list)
    brokers: list[Server] = field(default_factory=list)
    pool: Pool = field(default_factory=Pool)
    network: Network | None = None
    control: Host = HERE
    """Where etcd and the controllers are."""
    hosts: dict[str, Host] = field(default_factory=dict)
    """Where each broker is, by its name; empty without a network."""

    def host_of(self, broker: Server) -> Host:
        return self.hosts.get(broker.name, HERE)

    async def replicas(self) -> ReplicasInfo | None:
        """The broker set as the leading controller sees it."""
        for controller in self.controllers:
            command = request(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, body=encode_broker_names((BROKER,)))
            try:
                reply = await self.pool.request(controller.address, command, 2)
            except MQError:
                continue
            if reply.code == 0:
                return decode_body(BrokerReplicasInfo, reply.body_bytes).replicas_info_table.get(BROKER)
        return None

    async def in_sync(self, count: int = 3, *, without: Server | None = None) -> ReplicasInfo:
        """Wait until so many replicas are in the sync-state set, under a master that is not `without`."""
        async with asyncio.timeout(SECONDS):
            while True:
                found = await self.replicas()
                if (
                    found is not None
                    and len(found.in_sync_replicas) >= count
                    and found.master_address not in (None, "", without and without.address)
                ):
                    return found
                await asyncio.sleep(0.05)

    async def master(self, *, without: Server | None = None) -> Server:
        """Wait for a master that is not `without` and knows that it was elected."""
        async with asyncio.timeout(SECONDS):
            while True:
                found = await self.in_sync(1, without=without)
                if await self._serves(found.master_address or ""):
                    return next(broker for broker in self.brokers if broker.address == found.master_address)
                await asyncio.sleep(0.02)

    async def _serves(self, address: str) -> bool:
        try:
            reply = await self.pool.request(address, request(RequestCode.CONTROLLER_GET_BROKER_EPOCH_CACHE), 1)
        except MQError:
            return False
        return reply.code == 0 and decode_body(EpochEntryCache, reply.body_bytes).broker_id == 0

    async def logs_are_equal(self, seconds: float = SECONDS) -> None:
        """Wait until all brokers have the same bytes."""
        end = monotonic() + seconds
        while True:
            logs = await asyncio.to_thread(
                lambda: {broker.name: log_of(self.directory / broker.name) for broker in self.brokers}
            )
            if len(set(logs.values())) == 1:
                return
            assert monotonic() < end, {name: len(data) for name, data in logs.items()}
            await asyncio.sleep(0.1)


@asynccontextmanager
async def controlled_cluster(
    directory: Path,
    *,
    brokers: int = 3,
    controllers: int = 1,
    etcd_nodes: int = 1,
    settings: dict[str, object] | None = None,
    network: Network | None = None,
) -> AsyncIterator[ControlledCluster]:
    """A running set of brokers, all of them in the sync-state set; with a network each broker is a host of its own."""
    control = HERE if network is None else network.host()
    async with etcd(directory, etcd_nodes, control) as nodes:
        here = HERE if network is None else network.here
        arguments = ("namesrv", "--data", str(directory / "namesrv"), "--bind", here.address)
        names = _server("namesrv", arguments, here)
        cluster = ControlledCluster(directory, nodes, names, network=network, control=control)
        cluster.controllers = [_controller(directory, f"controller-{n}", nodes, control) for n in range(controllers)]
        for number in range(brokers):
            name = f"replica-{number}"
            if network is not None:
                cluster.hosts[name] = network.host()
            cluster.brokers.append(_broker(cluster, name, settings or {}))
        servers = [names, *cluster.controllers, *cluster.brokers]
        try:
            for server in servers:
                await server.start()
            await cluster.in_sync(brokers)
            yield cluster
        finally:
            await cluster.pool.close()
            for server in servers:
                server.close()


def _server(name: str, arguments: tuple[str, ...], host: Host, port: int | None = None) -> Server:
    """A server on a host; `port` if the arguments name it already."""
    made = Server(name, arguments, r"ready on ([^\s,]+)", port or lasting_port(), names_port=port is None)
    made.host, made.program = host.address, (*host.program_prefix, *DOWNRANGE)
    if host.pid or host is not HERE:
        made.arguments += ("--insecure",)
    return made


def _written(path: Path, settings: dict[str, object]) -> str:
    path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    return str(path)


def _controller(directory: Path, name: str, nodes: EtcdCluster, host: Host) -> Server:
    settings: dict[str, object] = {
        "etcdEndpoints": nodes.endpoints,
        "configStorePath": directory / f"{name}.properties",
    }
    config = _written(directory / f"{name}.conf", settings)
    port = lasting_port()
    return _server(name, ("controller", "--config", config, "--listen", f"{host.address}:{port}"), host, port)


def _broker(cluster: ControlledCluster, name: str, settings: dict[str, object]) -> Server:
    host = cluster.hosts.get(name, HERE)
    common: dict[str, object] = {
        "brokerName": BROKER,
        "namesrvAddr": cluster.namesrv.address,
        "brokerIP1": host.address,
        "bindAddress": host.address,
        "storePathRootDir": cluster.directory / name,
        "mappedFileSizeCommitLog": FILE_SIZE,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
        "metricsPort": -1,
        "grpcServerPort": -1,
        "waitTimeMillsInSendQueue": 2000,
        "enableControllerMode": "true",
        "controllerAddr": ";".join(controller.address for controller in cluster.controllers),
    }
    config = _written(cluster.directory / f"{name}.conf", common | settings)
    return _server(name, ("broker", "--config", config), host)


@dataclass
class Sender:
    """Sends numbered messages to whichever broker is master, and knows which of them were acknowledged."""

    cluster: ControlledCluster
    topic: str
    acknowledged: set[int] = field(default_factory=set)
    codes: Counter[int] = field(default_factory=Counter)
    """The codes of the replies; -1 for none."""
    longest_gap: float = 0.0
    """The longest time between two acknowledgements, in seconds."""
    _numbers: Iterator[int] = field(default_factory=count)
    _acknowledged_at: float = 0.0
    _is_over: bool = False

    @asynccontextmanager
    async def sending(self, tasks: int = 8) -> AsyncIterator[Sender]:
        """Send meanwhile."""
        self._acknowledged_at = monotonic()
        running = [asyncio.create_task(self._run()) for _ in range(tasks)]
        try:
            yield self
        finally:
            self._is_over = True
            await asyncio.gather(*running)

    async def acknowledges(self, more: int, seconds: float = SECONDS) -> None:
        """Wait until so many more messages are acknowledged."""
        wanted = len(self.acknowledged) + more
        async with asyncio.timeout(seconds):
            while len(self.acknowledged) < wanted:
                await asyncio.sleep(0.01)

    async def _run(self) -> None:
        pool = Pool()
        address = None
        while not self._is_over:
            address = address or await self._route(pool)
            if address is None:
                await asyncio.sleep(0.02)
                continue
            number = next(self._numbers)
            try:
                code = (await pool.request(address, self.message(number), 1.0)).code
            except MQError:
                code = -1
            self.codes[code] += 1
            if code == 0:
                self._note(number)
            else:
                address = None
                await asyncio.sleep(0.02)
        await pool.close()

    def message(self, number: int) -> Command:
        header = SendMessageRequest(
            producer_group="producers", topic=self.topic, queue_id=number % 4, born_timestamp=1_700_000_000_000
        )
        return request(RequestCode.SEND_MESSAGE_V2, header, body=b"%d" % number)

    def _note(self, number: int) -> None:
        now = monotonic()
        self.acknowledged.add(number)
        self.longest_gap = max(self.longest_gap, now - self._acknowledged_at)
        self._acknowledged_at = now

    async def _route(self, pool: Pool) -> str | None:
        command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": self.topic})
        try:
            reply = await pool.request(self.cluster.namesrv.address, command, 1.0)
        except MQError:
            return None
        if reply.code != 0:
            return None
        return decode_body(TopicRouteData, reply.body_bytes).broker_datas[0].master_address

    async def stored(self, broker: Server) -> Counter[int]:
        """The messages that a broker has, and how often."""
        async with connected(broker.address) as client:
            return Counter(int(message.body) for message in await drain(client, self.topic, 4))
