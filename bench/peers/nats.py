"""NATS JetStream: publishes to a stream in files, each acknowledged by the stream."""

from __future__ import annotations

import importlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.peers.clients import Calls, Client, RunningPeer
from bench.peers.driver import Peer, PeerFailed, connected_to, free_port, read_until
from bench.peers.processes import program

_STREAM = {"name": "bench", "subjects": ["bench"], "storage": "file", "retention": "limits", "num_replicas": 1}


@contextmanager
def start(directory: Path) -> Iterator[RunningPeer]:
    port = free_port()
    command = ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(directory / "data")]
    with program(command, f"127.0.0.1:{port}", directory) as running:
        _ask(running.address, b"$JS.API.STREAM.CREATE.bench", json.dumps(_STREAM).encode())
        yield running


def clear(address: str) -> None:
    _ask(address, b"$JS.API.STREAM.PURGE.bench", b"")


def _ask(address: str, subject: bytes, body: bytes) -> None:
    with connected_to(address) as connected:
        connected.sendall(Session(connected).publish(subject, body))
        if b'"error"' in (answer := read_until(connected, b"}\r\n")):
            raise PeerFailed(f"NATS refused {subject.decode()}: {answer[-300:]!r}")


class Session:
    """A connection with an inbox of its own, where the stream says which sequence number a message got."""

    def __init__(self, connected: socket.socket) -> None:
        self._inbox = b"_INBOX." + secrets.token_hex(8).encode()
        self._rest = b""
        read_until(connected, b"\r\n")  # INFO {…}
        options = b'{"verbose":false,"pedantic":false,"lang":"bench","version":"1","protocol":1}'
        connected.sendall(b"CONNECT %b\r\nSUB %b 1\r\nPING\r\n" % (options, self._inbox))
        read_until(connected, b"PONG\r\n")

    def request(self, body: bytes) -> bytes:
        return self.publish(b"bench", body)

    def publish(self, subject: bytes, body: bytes) -> bytes:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, self._inbox, len(body), body)

    def feed(self, data: bytes) -> int:
        """`MSG <inbox> 1 <size>`, then `{"stream":"bench","seq":7}`."""
        data = self._rest + data
        whole, end, self._rest = data.rpartition(b"\r\n")
        if b'"error"' in whole or b"-ERR" in whole:
            raise PeerFailed(f"NATS refused: {whole[-300:]!r}")
        return (whole + end).count(b'"seq":')


@asynccontextmanager
async def client(address: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
    """JetStream's asynchronous publish: the future it returns is the acknowledgement."""
    connection: Any = await importlib.import_module("nats").connect(f"nats://{address}")
    stream: Any = connection.jetstream()

    async def publish() -> None:
        await (await stream.publish_async("bench", body))

    try:
        yield Calls(publish, side_by_side=in_flight)
    finally:
        await connection.close()


PEER = Peer("nats-server", start, Session, clear, Client("nats-py", "nats", client))
