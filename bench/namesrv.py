"""Route requests per second of a name server process, beside a bare echo server driven the same way.

One blocking connection, `WINDOW` requests sent at a time, all answers awaited before the next window. Wall rates depend
on what else the machine does; server CPU per request repeats better.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

from bench.report import Figure, alternate, cpu_seconds, table
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import encode_body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.registration import RegisterBrokerBody
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode, SerializeType
from downrange.protocol.command import request
from downrange.protocol.framing import FrameDecoder, encode
from downrange.transport.pool import connect

WINDOW = 64
WINDOWS = 150


def start(stack: ExitStack, *command: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and the address it printed."""
    process = stack.enter_context(subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True))
    stack.callback(process.terminate)
    assert process.stdout is not None
    ready = re.search(r"ready on (\S+)", process.stdout.readline())
    assert ready is not None
    return process, ready[1]


async def register(address: str) -> None:
    """A broker with a hundred topics of eight queues."""
    topics = {f"topic-{n}": TopicConfig(f"topic-{n}", 8, 8) for n in range(100)}
    body = RegisterBrokerBody(
        topic_config_serialize_wrapper=TopicConfigTable(topic_config_table=topics, data_version=DataVersion(counter=1))
    )
    fields = {"brokerName": "broker-a", "brokerAddr": "127.0.0.1:10911", "clusterName": "C", "haServerAddr": "x:1"}
    connection = await connect(address)
    await connection.request(
        request(RequestCode.REGISTER_BROKER, ext_fields={**fields, "brokerId": "0"}, body=encode_body(body)), timeout=5
    )
    # The broker must stay connected while its routes are asked for.
    KEPT.append(connection)


KEPT: list[object] = []


def driver(address: str, frame: bytes, expected_code: int = 0) -> Callable[[], int]:
    """Ask `WINDOWS` times `WINDOW` requests over one connection, after a look at the first answer."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(frame)
    reply_size = 4 + int.from_bytes(sock.recv(4, socket.MSG_PEEK | socket.MSG_WAITALL), "big")
    (reply,) = FrameDecoder().feed(sock.recv(reply_size, socket.MSG_WAITALL))
    assert reply.code in (0, expected_code), reply.remark
    window = frame * WINDOW

    def work() -> int:
        for _ in range(WINDOWS):
            sock.sendall(window)
            receive(sock, reply_size * WINDOW)
        return WINDOW * WINDOWS

    return work


def receive(sock: socket.socket, count: int) -> None:
    while count:
        count -= len(sock.recv(min(count, 1 << 20)))


def run() -> list[Figure]:
    loop = asyncio.new_event_loop()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as data:
        stack.callback(loop.close)
        server, address = start(
            stack, "-m", "downrange.cli.main", "namesrv", "-p", "0", "-d", data, "--log-level", "ERROR"
        )
        _, echo_address = start(stack, "-m", "bench.echo")
        loop.run_until_complete(register(address))
        frames = {
            kind: encode(
                request(RequestCode.GET_ROUTEINFO_BY_TOPIC, ext_fields={"topic": "topic-7"}, serialize_type=kind)
            )
            for kind in SerializeType
        }
        works = {"echo": driver(echo_address, frames[SerializeType.JSON], RequestCode.GET_ROUTEINFO_BY_TOPIC)}
        works |= {f"route requests, {kind.name}": driver(address, frame) for kind, frame in frames.items()}
        before = cpu_seconds(server.pid)
        rates = alternate(works)
        spent = cpu_seconds(server.pid) - before
        asked = 5 * 2 * WINDOW * WINDOWS
    figures = [Figure("echo of the same frames", rates["echo"], "frames/s")]
    figures += [
        Figure(name, rate, "requests/s", rate / rates["echo"], "echo") for name, rate in rates.items() if name != "echo"
    ]
    return [*figures, Figure("name server CPU a route request", spent / asked * 1e6, "µs")]


if __name__ == "__main__":
    print(table(run()))
