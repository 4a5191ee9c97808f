"""Real etcd processes on the loopback address, one or three, that a test starts, stops and kills."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from downrange.controller.coordination import Put, StoreUnavailable
from downrange.controller.etcd import EtcdAccess, EtcdClient
from downrange.controller.http_json import Endpoint
from tests.support.lasting_port import lasting_port
from tests.support.network import Host

HERE = Host("127.0.0.1")
MISSING = "etcd is missing: scripts/setup installs it (Debian: apt-get install etcd-server)"


class EtcdNode:
    """One etcd process; its data outlive it."""

    def __init__(self, name: str, directory: Path, host: Host = HERE) -> None:
        self.name = name
        self._host = host
        self.client_port = lasting_port()
        self.peer_port = lasting_port()
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{self._host.address}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://{self._host.address}:{self.peer_port}"

    def start(self, members: str, *more: str) -> None:
        assert shutil.which("etcd"), MISSING
        log = (self._directory / f"{self.name}.log").open("ab")
        self._process = subprocess.Popen(
            [
                *(
                    *self._host.program_prefix,
                    "etcd",
                    "--name",
                    self.name,
                    "--data-dir",
                    str(self._directory / self.name),
                ),
                *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
                *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
                *("--initial-cluster", members, "--initial-cluster-token", "test"),
                *("--initial-cluster-state", "new", "--heartbeat-interval", "50", "--election-timeout", "500"),
                *("--log-level", "warn", *more),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
        )
        log.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def hang(self) -> None:
        """SIGSTOP, and wait until every thread stands still: on a busy machine some go on for a while."""
        self.signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """As `kill -9` does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None


class EtcdCluster:
    """Some etcd nodes that know each other."""

    def __init__(self, directory: Path, count: int, host: Host = HERE) -> None:
        self.nodes = [EtcdNode(f"e{number}", directory, host) for number in range(count)]
        self._clients: list[EtcdClient] = []

    @property
    def endpoints(self) -> str:
        return ";".join(node.endpoint for node in self.nodes)

    def start(self, node: EtcdNode) -> None:
        node.start(",".join(f"{one.name}={one.peer_url}" for one in self.nodes))

    def client(self, *nodes: EtcdNode, timeout: float = 3.0) -> EtcdClient:
        """A client of these nodes; of all, if none are named."""
        endpoints = tuple(Endpoint.parse(node.endpoint) for node in nodes or self.nodes)
        made = EtcdClient(EtcdAccess(endpoints, timeout))
        self._clients.append(made)
        return made

    async def stop(self) -> None:
        """Close all clients and end all processes."""
        for client in self._clients:
            await client.close()
        for node in self.nodes:
            node.kill()

    async def until_writable(self, *nodes: EtcdNode) -> None:
        """Wait until a write succeeds at each of these nodes; at all, if none are named."""
        for node in nodes or self.nodes:
            client = self.client(node)
            try:
                async with asyncio.timeout(30):
                    while True:
                        try:
                            await client.txn([], [Put("/ready", b"")])
                            break
                        except StoreUnavailable:
                            await asyncio.sleep(0.05)
            finally:
                await client.close()

    async def leader(self) -> EtcdNode:
        """The node that leads now."""
        for node in self.nodes:
            client = self.client(node)
            try:
                status = await client._read("/v3/maintenance/status", {})
            finally:
                await client.close()
            if status["leader"] == status["header"]["member_id"]:
                return node
        raise AssertionError("no etcd node leads")


@asynccontextmanager
async def etcd(directory: Path, count: int = 1, host: Host = HERE) -> AsyncIterator[EtcdCluster]:
    """A running etcd cluster; its processes end with the block."""
    cluster = EtcdCluster(directory, count, host)
    try:
        for node in cluster.nodes:
            cluster.start(node)
        await cluster.until_writable()
        yield cluster
    finally:
        await cluster.stop()
