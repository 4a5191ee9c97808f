"""A master and its slave as real processes that a test can kill, each keeping its port and its data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.kv_config import KVTable
from downrange.protocol.codes import RequestCode
from tests.support.network import Host, Network
from tests.support.process_cluster import Server, broker_server
from tests.support.processes import DOWNRANGE
from tests.support.requests import connected

BROKER = "broker-a"
FILE_SIZE = 4 << 20


@dataclass(frozen=True)
class ReplicaProcesses:
    """A name server, a master and a slave. Holds always: data directories are `master` and `slave` in `directory`."""

    directory: Path
    namesrv: Server
    master: Server
    slave: Server
    hosts: Mapping[str, Host] = field(default_factory=dict)
    """Of each server by its name, if they are hosts of a network."""

    def close(self) -> None:
        for server in (self.slave, self.master, self.namesrv):
            server.close()


@asynccontextmanager
async def replica_processes(
    directory: Path,
    role: str = "SYNC_MASTER",
    *,
    slave_settings: dict[str, object] | None = None,
    network: Network | None = None,
) -> AsyncIterator[ReplicaProcesses]:
    """A running cluster; with a network each server is a host of its own."""
    hosts = {} if network is None else {name: network.host() for name in ("namesrv", "master", "slave")}
    names = Server("namesrv", ("namesrv", "--data", str(directory / "namesrv")), r"name server ready on (\S+)")
    if hosts:
        names.arguments += ("--bind", hosts["namesrv"].address)
        _move(names, hosts["namesrv"])
    await names.start()
    master = _server(directory, "master", names, {"brokerRole": role}, hosts)
    slave = _server(directory, "slave", names, {"brokerRole": "SLAVE", "brokerId": 1, **(slave_settings or {})}, hosts)
    cluster = ReplicaProcesses(directory, names, master, slave, hosts)
    try:
        await master.start()
        await slave.start()
        await following(cluster)
        yield cluster
    finally:
        cluster.close()


def _server(
    directory: Path, name: str, names: Server, settings: Mapping[str, object], hosts: Mapping[str, Host]
) -> Server:
    common = {
        "brokerName": BROKER,
        "mappedFileSizeCommitLog": FILE_SIZE,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
    }
    if name not in hosts:
        return broker_server(directory, name, names.address, {**common, **settings})
    place = {"brokerIP1": hosts[name].address, "bindAddress": hosts[name].address}
    made = broker_server(directory, name, names.address, {**common, **place, **settings})
    _move(made, hosts[name])
    return made


def _move(server: Server, host: Host) -> None:
    """Let a server run on a host of a network, open to all of it."""
    server.host = host.address
    server.program = (*host.program_prefix, *DOWNRANGE)
    server.arguments += ("--insecure",)


async def runtime_of(address: str) -> dict[str, str]:
    async with connected(address) as client:
        return decode_body(KVTable, (await client.call(RequestCode.GET_BROKER_RUNTIME_INFO)).body_bytes).table


async def following(cluster: ReplicaProcesses, seconds: float = 20) -> None:
    """Until the slave has the whole log and the master knows it."""
    async with asyncio.timeout(seconds):
        while True:
            master, slave = await runtime_of(cluster.master.address), await runtime_of(cluster.slave.address)
            if "haSlaves" in master and master["commitLogMaxOffset"] == slave["commitLogMaxOffset"]:
                return
            await asyncio.sleep(0.05)


def log_of(directory: Path) -> bytes:
    """All files of a commit log; zeros follow the last record."""
    return b"".join(path.read_bytes() for path in sorted((directory / "commitlog").iterdir())).rstrip(b"\0")
