"""A cluster of real processes that a drill can break: name servers and brokers, each broker behind a fault proxy if
wanted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.fault_proxy import FaultProxy
from tests.support.lasting_port import lasting_port
from tests.support.processes import DOWNRANGE, Running

CLIENTS_REACH: Final = "127.0.0.1"
BEHIND_PROXY: Final = "127.0.0.2"
"""A broker behind a proxy listens on the port it announces, but on this address; the proxy has the announced one."""


@dataclass
class Server:
    """One name server or broker. It keeps its port and its data over any number of deaths. Blocking work is done in
    threads, so that clients on the event loop go on meanwhile."""

    name: str
    arguments: tuple[str, ...]
    ready: str
    port: int = field(default_factory=lasting_port)
    process: Running | None = None
    names_port: bool = True
    """Whether the port is given as `--port`; else it is in the arguments already."""
    host: str = CLIENTS_REACH
    program: tuple[str, ...] = DOWNRANGE
    complaints: str = ""
    """What ended processes of this server wrote to standard error."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def start(self) -> None:
        """Returns when the server says it is ready."""
        port = ("--port", str(self.port)) if self.names_port else ()
        self.process = Running(*self.arguments, *port, "--log-level", "ERROR", program=self.program)
        await asyncio.to_thread(self.process.wait_for, self.ready)

    async def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        await asyncio.to_thread(self.process.kill)
        self.close()

    def stop(self) -> None:
        """SIGSTOP: the process hangs, its sockets stay open."""
        assert self.process is not None
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None:
            self.complaints += self.process.errors
            self.process.close()
            self.process = None


@dataclass
class ProcessCluster:
    """Holds always: brokers are in order of their names; `proxies` has one for each broker, or is empty."""

    namesrvs: list[Server] = field(default_factory=list)
    brokers: list[Server] = field(default_factory=list)
    proxies: list[FaultProxy] = field(default_factory=list)

    @property
    def namesrv(self) -> str:
        return ";".join(server.address for server in self.namesrvs)


@asynccontextmanager
async def process_cluster(
    directory: Path, *, brokers: int, namesrvs: int = 2, behind_proxies: bool = False
) -> AsyncIterator[ProcessCluster]:
    """A running cluster; brokers are named broker-000, broker-001, … as in the simulator."""
    cluster = ProcessCluster()
    try:
        for number in range(namesrvs):
            data = directory / f"namesrv-{number}"
            cluster.namesrvs.append(Server(data.name, ("namesrv", "--data", str(data)), r"name server ready on (\S+)"))
        await _start(cluster.namesrvs)
        for number in range(brokers):
            bound = {"bindAddress": BEHIND_PROXY} if behind_proxies else {}
            cluster.brokers.append(broker_server(directory, f"broker-{number:03d}", cluster.namesrv, bound))
        await _start(cluster.brokers)
        if behind_proxies:
            for broker in cluster.brokers:
                proxy = FaultProxy((BEHIND_PROXY, broker.port), CLIENTS_REACH, broker.port)
                await proxy.accept()
                cluster.proxies.append(proxy)
        yield cluster
    finally:
        for proxy in cluster.proxies:
            await proxy.close()
        for server in (*cluster.brokers, *cluster.namesrvs):
            server.close()


def broker_server(directory: Path, name: str, namesrv: str, settings: Mapping[str, object]) -> Server:
    """A broker that is not started yet; its data is in `directory / name`."""
    config = directory / f"{name}.conf"
    common = {
        "brokerName": name,
        "namesrvAddr": namesrv,
        "brokerIP1": CLIENTS_REACH,
        "bindAddress": CLIENTS_REACH,
        "storePathRootDir": directory / name,
        "mappedFileSizeCommitLog": 64 * 1024 * 1024,
        "metricsPort": -1,
        "grpcServerPort": -1,
        # RocketMQ's 200 ms would turn a hiccup of a busy machine into flow control, which is final for a send.
        "waitTimeMillsInSendQueue": 2000,
    }
    config.write_text("".join(f"{key}={value}\n" for key, value in {**common, **settings}.items()))
    return Server(name, ("broker", "--config", str(config)), r"ready on ([^\s,]+)")


async def _start(servers: list[Server]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for server in servers:
            tasks.create_task(server.start())
