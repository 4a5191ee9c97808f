"""RabbitMQ: persistent messages to a durable queue, with publisher confirms. Frames are those of AMQP 0-9-1.

frame = type 1 | channel 2 | size 4 | payload | 0xCE          type 1 method, 2 content header, 3 body
method payload = class 2 | method 2 | arguments
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.peers.clients import Calls, Client, RunningPeer
from bench.peers.driver import Peer, PeerFailed, connected_to, free_port
from bench.peers.processes import program

PROGRAM: Final = "rabbitmq-server"
# Debian's command of this name becomes another user and forgets the environment; what it calls in the end does neither.
SCRIPT: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
QUEUE: Final = b"bench"
_FRAME: Final = struct.Struct(">BHI")
_METHOD: Final = struct.Struct(">HH")
_ACK: Final = struct.Struct(">QB")
_END: Final = b"\xce"
_METHOD_FRAME, _HEADER_FRAME, _BODY_FRAME = 1, 2, 3
_BASIC: Final = 60
_ACKNOWLEDGED, _REFUSED = (_BASIC, 80), (_BASIC, 120)


@contextmanager
def start(directory: Path) -> Iterator[RunningPeer]:
    port = free_port()
    (directory / "enabled_plugins").write_text("[].\n")
    environment = {
        "RABBITMQ_NODENAME": f"bench-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "logs"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "none"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "none"),
        "HOME": str(directory),
        # The script becomes the server; otherwise it would stay in front of it and pass signals on.
        "RUNNING_UNDER_SYSTEMD": "true",
    }
    command = [str(SCRIPT) if SCRIPT.exists() else PROGRAM]
    # Erlang's register of nodes. RabbitMQ would start one in the background and leave it behind.
    registry = subprocess.Popen(["epmd"], env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        with program(command, f"127.0.0.1:{port}", directory, environment) as running:
            yield running
    finally:
        registry.terminate()
        registry.wait()


def clear(address: str, open_session: Callable[[socket.socket], Session]) -> None:
    with connected_to(address) as connected:
        session = open_session(connected)
        connected.sendall(method(1, 50, 30, b"\0\0" + short(QUEUE) + b"\0"))
        session.expect(connected, 50, 31)


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _FRAME.pack(kind, channel, len(payload)) + payload + _END


def method(channel: int, class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return frame(_METHOD_FRAME, channel, _METHOD.pack(class_id, method_id) + arguments)


def short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


def long(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


class Session:
    """One connection with one channel that confirms, and a durable queue of this kind: classic or quorum."""

    def __init__(self, connected: socket.socket, queue_type: bytes = b"classic") -> None:
        self._rest = b""
        self._confirmed = 0
        self._early: set[int] = set()
        """Confirmed out of turn."""
        connected.sendall(b"AMQP\0\0\x09\x01")
        self.expect(connected, 10, 10)
        connected.sendall(method(0, 10, 11, long(b"") + short(b"PLAIN") + long(b"\0guest\0guest") + short(b"en_US")))
        tune = self.expect(connected, 10, 30)
        connected.sendall(method(0, 10, 31, tune[:6] + b"\0\0"))  # as the server proposes, but no heartbeats
        connected.sendall(method(0, 10, 40, short(b"/") + short(b"") + b"\0"))
        self.expect(connected, 10, 41)
        connected.sendall(method(1, 20, 10, short(b"")))
        self.expect(connected, 20, 11)
        durable = b"\x02"
        table = long(short(b"x-queue-type") + b"S" + long(queue_type))
        connected.sendall(method(1, 50, 10, b"\0\0" + short(QUEUE) + durable + table))
        self.expect(connected, 50, 11)
        connected.sendall(method(1, 85, 10, b"\0"))
        self.expect(connected, 85, 11)

    def expect(self, connected: socket.socket, class_id: int, method_id: int) -> bytes:
        """The arguments of the one method that may come now."""
        kind, _, size = _FRAME.unpack(_read(connected, _FRAME.size))
        payload = _read(connected, size + 1)[:-1]
        if kind != _METHOD_FRAME or _METHOD.unpack_from(payload) != (class_id, method_id):
            raise PeerFailed(f"RabbitMQ sent {payload[:100]!r} where method {class_id}.{method_id} was expected")
        return payload[_METHOD.size :]

    def request(self, body: bytes) -> bytes:
        publish = method(1, _BASIC, 40, b"\0\0" + short(b"") + short(QUEUE) + b"\0")
        persistent = struct.pack(">HHQHB", _BASIC, 0, len(body), 1 << 12, 2)
        return publish + frame(_HEADER_FRAME, 1, persistent) + frame(_BODY_FRAME, 1, body)

    def feed(self, data: bytes) -> int:
        data = self._rest + data
        before = self._confirmed + len(self._early)
        at = 0
        while len(data) - at >= _FRAME.size:
            kind, _, size = _FRAME.unpack_from(data, at)
            end = at + _FRAME.size + size + 1
            if end > len(data):
                break
            if kind == _METHOD_FRAME:
                self._take(data[at + _FRAME.size : end - 1])
            at = end
        self._rest = data[at:]
        return self._confirmed + len(self._early) - before

    def _take(self, payload: bytes) -> None:
        found = _METHOD.unpack_from(payload)
        if found == _REFUSED:
            raise PeerFailed("RabbitMQ refused a message (basic.nack)")
        if found != _ACKNOWLEDGED:
            raise PeerFailed(f"RabbitMQ sent method {found} in the middle of the load: {payload[:100]!r}")
        tag, multiple = _ACK.unpack_from(payload, _METHOD.size)
        if multiple:
            self._confirmed = max(self._confirmed, tag)
            self._early = {other for other in self._early if other > tag}
        else:
            self._early.add(tag)
        while self._confirmed + 1 in self._early:
            self._confirmed += 1
            self._early.discard(self._confirmed)


def _read(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connected.recv(count - len(data))
        if not more:
            raise PeerFailed("RabbitMQ closed the connection: does it know the user guest?")
        data += more
    return data


@asynccontextmanager
async def client(address: str, body: bytes, in_flight: int) -> AsyncIterator[Calls]:
    """Publishes side by side on one channel, each of which waits for its confirm. The queue must be there."""
    library: Any = importlib.import_module("aio_pika")
    connection = await library.connect(f"amqp://guest:guest@{address}/")
    channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
    exchange, persistent = channel.default_exchange, library.DeliveryMode.PERSISTENT

    async def publish() -> None:
        await exchange.publish(library.Message(body, delivery_mode=persistent), QUEUE.decode())

    try:
        yield Calls(publish, side_by_side=in_flight)
    finally:
        await connection.close()


def _peer(open_session: Callable[[socket.socket], Session]) -> Peer:
    clear_queue = partial(clear, open_session=open_session)
    return Peer(PROGRAM, start, open_session, clear_queue, Client("aio-pika", "aio_pika", client))


PEER = _peer(Session)
QUORUM_PEER = _peer(partial(Session, queue_type=b"quorum"))
