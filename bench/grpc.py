"""The gRPC port: sends, receives with acknowledgements, and telemetry streams that do nothing.

The generator writes HTTP/2 by itself, with the header fields of the official Python client; what it does not do is what
grpcio does beside. Sends over remoting of the same run are what the gRPC port adds to.
"""

from __future__ import annotations

import asyncio
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import hpack

from bench.connections import allow_descriptors
from bench.report import QUICK, Figure, compared, cpu_seconds, table
from bench.served import send_apart, target
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.load import SendPlan
from downrange.model.topics import TopicConfig
from downrange.proxy.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    HEAD_SIZE,
    PREFACE,
    Kind,
    Setting,
    encode_frame,
    encode_settings,
    encode_window_update,
)
from downrange.proxy.times import put
from downrange.proxy.wire import messages as m
from downrange.proxy.wire.enums import ClientType, FilterType, MessageType
from downrange.proxy.wire.schema import SERVICE
from downrange.transport.loop import run as run_loop
from tests.support.standalone_process import Standalone, standalone_process

SECONDS: Final = 0.5 if QUICK else 3.0
STREAMS: Final = 300 if QUICK else 5000
BODY: Final = 1024
TOPIC: Final = "bench-grpc"
_HEAD: Final = struct.Struct(">HBBBI")


class Client(asyncio.Protocol):
    """One connection. `done` is called with the data of each answer that is complete."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.done: Callable[[bytes], None] = lambda data: None
        self._encoder = hpack.Encoder()
        self._number = -1
        self._rest = b""
        self._data: dict[int, bytes] = {}
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.write(PREFACE + encode_settings({Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
        self.write(encode_window_update(0, (1 << 30) - 1))

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def call(self, method: str, request: bytes, *, ends: bool = True) -> None:
        self._number += 2
        fields = [
            (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}"), (":authority", "127.0.0.1"),
            ("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "grpc-python-asyncio/1.76.0"),
            ("x-mq-client-id", self.client_id), ("x-mq-language", "PYTHON"), ("x-mq-protocol", "GRPC_V2"),
            ("x-mq-client-version", "5.1.2"), ("x-mq-date-time", time.strftime("%Y%m%dT%H%M%SZ")),
            ("x-mq-request-id", str(uuid.uuid4())), ("grpc-timeout", "3S" if method == "SendMessage" else "30S"),
        ]  # fmt: skip
        block = self._encoder.encode(fields)
        data = b"\0" + len(request).to_bytes(4, "big") + request
        self.write(
            encode_frame(Kind.HEADERS, END_HEADERS, self._number, block)
            + encode_frame(Kind.DATA, END_STREAM if ends else 0, self._number, data)
        )

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at = 0
        while len(data) - at >= HEAD_SIZE:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            end = at + HEAD_SIZE + (high << 8 | low)
            if len(data) < end:
                break
            if kind == Kind.DATA:
                self._data[stream] = self._data.get(stream, b"") + data[at + HEAD_SIZE : end]
                if not flags & END_STREAM and stream in self._open:
                    self.done(self._data.pop(stream))
            elif kind == Kind.HEADERS and flags & END_STREAM:
                self.done(self._data.pop(stream, b""))
            elif kind == Kind.SETTINGS and not flags & ACK:
                self.write(encode_frame(Kind.SETTINGS, ACK, 0))
            at = end
        self._rest = data[at:]

    _open: frozenset[int] = frozenset()


async def connected(address: str, count: int) -> list[Client]:
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    made = []
    for number in range(count):
        _, client = await loop.create_connection(lambda n=number: Client(f"bench@{n}"), host, int(port))  # type: ignore[misc]
        made.append(client)
    return made


def send_request() -> bytes:
    request = m.SendMessageRequest()
    message = request.messages.add()
    message.topic.name = TOPIC
    message.body = bytes(BODY)
    system = message.system_properties
    system.message_id = "01" + uuid.uuid4().hex.upper()
    system.tag = "TagA"
    system.keys.append("key")
    system.message_type = MessageType.NORMAL
    system.body_encoding = 1
    put(system.born_timestamp, int(time.time() * 1000))
    system.born_host = "localhost"
    return request.SerializeToString()


async def sends(address: str, connections: int, outstanding: int) -> int:
    """Send for some seconds; how many sends were answered."""
    clients = await connected(address, connections)
    count = 0
    is_over = False

    def again(client: Client) -> Callable[[bytes], None]:
        def answered(data: bytes) -> None:
            nonlocal count
            count += 1
            if not is_over:
                client.call("SendMessage", send_request())

        return answered

    for client in clients:
        client.done = again(client)
        for _ in range(outstanding):
            client.call("SendMessage", send_request())
    await asyncio.sleep(SECONDS)
    is_over = True
    await asyncio.sleep(0.2)
    return count


async def receives(address: str, connections: int) -> int:
    """Receive 32 messages at a time and acknowledge each; how many messages were acknowledged."""
    request = m.ReceiveMessageRequest(batch_size=32)
    request.group.name = "bench-grpc-group"
    request.message_queue.topic.name = TOPIC
    request.filter_expression.type = FilterType.TAG
    request.filter_expression.expression = "*"
    put(request.invisible_duration, 60_000)
    put(request.long_polling_timeout, 1000)
    clients = await connected(address, connections)
    acknowledged = 0
    end = time.monotonic() + SECONDS

    def serve(client: Client) -> Callable[[bytes], None]:
        waiting = 0

        def answered(data: bytes) -> None:
            nonlocal waiting, acknowledged
            if waiting:
                waiting -= 1
                acknowledged += 1
            else:
                for handle in handles_of(data):
                    ack = m.AckMessageRequest()
                    ack.group.name, ack.topic.name = "bench-grpc-group", TOPIC
                    entry = ack.entries.add()
                    entry.receipt_handle = handle
                    client.call("AckMessage", ack.SerializeToString())
                    waiting += 1
            if not waiting and time.monotonic() < end:
                client.call("ReceiveMessage", request.SerializeToString())

        return answered

    for client in clients:
        client.done = serve(client)
        client.call("ReceiveMessage", request.SerializeToString())
    await asyncio.sleep(SECONDS + 0.3)
    return acknowledged


def handles_of(data: bytes) -> Iterator[str]:
    at = 0
    while at < len(data):
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        response = m.ReceiveMessageResponse.FromString(data[at + 5 : end])
        if response.WhichOneof("kind") == "message":
            yield response.message.system_properties.receipt_handle
        at = end


async def idle_streams(address: str, resident: Callable[[], int]) -> tuple[float, float]:
    """Bytes and seconds of the server for each of many telemetry streams that do nothing."""
    command = m.TelemetryCommand()
    command.settings.client_type = ClientType.PUSH_CONSUMER
    command.settings.subscription.group.name = "bench-grpc-group"
    entry = command.settings.subscription.subscriptions.add()
    entry.topic.name = TOPIC
    entry.expression.type = FilterType.TAG
    entry.expression.expression = "*"
    before = resident()
    clients = await connected(address, STREAMS)
    answered = 0
    everyone = asyncio.Event()

    def count(data: bytes) -> None:
        nonlocal answered
        answered += 1
        if answered == STREAMS:
            everyone.set()

    for number, client in enumerate(clients):
        client.done = count
        client._open = frozenset({1})
        client.call("Telemetry", command.SerializeToString(), ends=False)
        if number % 100 == 99:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(120):
        await everyone.wait()
    await asyncio.sleep(2)  # the settings come a second time
    return (resident() - before) / STREAMS, STREAMS


@contextmanager
def servers() -> Iterator[Standalone]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        settings = {"waitTimeMillsInSendQueue": 10_000, "metricsPort": -1}
        with standalone_process(Path(directory), settings, grpc_port=0, log_level="ERROR") as running:

            async def create() -> None:
                async with Admin(ClientConfig.of(running.namesrv)) as admin:
                    await admin.topics.create(TopicConfig(TOPIC, 8, 8))

            run_loop(create())
            yield running


def run() -> list[Figure]:
    allow_descriptors(2 * STREAMS + 1000)
    rows = []
    with servers() as running:
        pid = running.process.pid
        base = send_apart(target(running), SendPlan(SECONDS, 0.3, connections=4, outstanding=16))
        remoting = base.server_cpu_micros or 0.0
        for name, shape in {"1 caller": (1, 1), "4 connections, 64 sends at once": (4, 16)}.items():
            began = cpu_seconds(pid)
            count = run_loop(sends(running.grpc, *shape))
            micros = (cpu_seconds(pid) - began) * 1e6 / max(1, count)
            rows.append(Figure(f"sends, {name}", count / SECONDS, "messages/s"))
            rows.append(compared(f"CPU of the server, {name}", micros, "µs/message", remoting, "remoting sends"))
        began = cpu_seconds(pid)
        count = run_loop(receives(running.grpc, 4))
        micros = (cpu_seconds(pid) - began) * 1e6 / max(1, count)
        rows.append(Figure("receives of 32 and single acks, 4 connections", count / SECONDS, "messages/s"))
        rows.append(Figure("CPU of the server, receives and acks", micros, "µs/message"))
        size, _ = run_loop(idle_streams(running.grpc, lambda: running.resident_bytes))
        rows.append(Figure(f"memory of {STREAMS} idle telemetry streams, each on its connection", size, "bytes each"))
    return rows


if __name__ == "__main__":
    print(table(run()))
