"""The processes of etcd in a local cluster."""

from __future__ import annotations

import http.client
import shutil
from collections.abc import Sequence
from typing import Protocol

from downrange.cli.options import UsageError

PEER_PORT_ABOVE = 1


class Node(Protocol):
    """A server with a name and an address."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def port(self) -> int: ...


def check_etcd() -> None:
    """Raise UsageError when etcd is not installed."""
    if shutil.which("etcd") is None:
        raise UsageError("a cluster with controllers needs etcd, which is not installed: apt-get install etcd-server")


def etcd_command(member: Node, nodes: Sequence[Node], data: str) -> list[str]:
    """The command line of one node of etcd."""
    client = f"http://{member.address}"
    peer = _peer_url(member)
    return [
        *("etcd", "--name", member.name, "--data-dir", data, "--log-level", "warn"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", ",".join(f"{one.name}={_peer_url(one)}" for one in nodes)),
        *("--initial-cluster-token", "downrange", "--heartbeat-interval", "50", "--election-timeout", "500"),
    ]


def is_healthy(address: str) -> bool:
    """Whether a node of etcd answers, and its cluster has a leader."""
    connection = http.client.HTTPConnection(address, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read(1000)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _peer_url(node: Node) -> str:
    host = node.address.rpartition(":")[0]
    return f"http://{host}:{node.port + PEER_PORT_ABOVE}"
