"""Redis Streams: XADD with an append-only file, synced every second or before each answer."""

from __future__ import annotations

import importlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.clients import Calls, Client, RunningPeer
from bench.peers.driver import Peer, PeerFailed, connected_to, free_port, read_until
from bench.peers.processes import program


@contextmanager
def start(directory: Path, *, fsync: str) -> Iterator[RunningPeer]:
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", fsync]
    with program(command, f"127.0.0.1:{port}", directory) as running:
        yield running


def clear(address: str) -> None:
    with connected_to(address) as connected:
        Session(connected)
        connected.sendall(_command(b"DEL", b"bench"))
        if not (answer := read_until(connected, b"\r\n")).startswith(b":"):
            raise PeerFailed(f"Redis answers DEL with {answer!r}")


class Session:
    """A connection. Answers to XADD are entry ids of two lines: `$15`, `1700000000000-0`."""

    def __init__(self, connected: socket.socket) -> None:
        self._rest = b""
        connected.sendall(_command(b"PING"))
        if (answer := read_until(connected, b"\r\n")) != b"+PONG\r\n":
            raise PeerFailed(f"Redis answers PING with {answer!r}")

    def request(self, body: bytes) -> bytes:
        return _command(b"XADD", b"bench", b"*", b"body", body)

    def feed(self, data: bytes) -> int:
        data = self._rest + data
        if data.startswith(b"-") or b"\n-" in data:
            raise PeerFailed(f"Redis refused: {data[-200:]!r}")
        count = data.count(b"\n") // 2
        self._rest = data.split(b"\n", 2 * count)[-1]
        return count


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


@asynccontextmanager
async def client(address: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
    """Pipelines of XADD. The blocking client with hiredis, alone on its loop: it takes half the CPU of the other."""
    host, _, port = address.rpartition(":")
    redis: Any = importlib.import_module("redis").Redis(host=host, port=int(port), socket_timeout=10)
    fields = {"body": body}

    async def add_one() -> None:
        redis.xadd("bench", fields)

    async def add_many() -> None:
        pipeline = redis.pipeline(transaction=False)
        for _ in range(in_flight):
            pipeline.xadd("bench", fields)
        pipeline.execute()

    try:
        yield Calls(add_one if in_flight == 1 else add_many, messages=in_flight)
    finally:
        redis.close()


_CLIENT = Client("redis-py", "redis", client)
PEER = Peer("redis-server", partial(start, fsync="everysec"), Session, clear, _CLIENT)
SYNCED_PEER = Peer("redis-server", partial(start, fsync="always"), Session, clear, _CLIENT)
