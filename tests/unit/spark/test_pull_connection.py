"""A connection for pulls: answers cut anywhere, large ones received in place, and every request ends once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.framing import encode
from downrange.spark.pull_connection import PullConnection, PullConnections
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, ConnectionLost, RequestTimedOut, TransportClosed
from downrange.transport.limits import Limits
from downrange.transport.server import Server
from downrange.transport.serving import CommandHandler, serve_commands

PULL = request(RequestCode.PULL_MESSAGE, ext_fields={"topic": "orders"})


class Pipe(asyncio.Transport):
    """Keeps what is written; `deliver` hands bytes to the protocol as a loop does."""

    def __init__(self, protocol: PullConnection) -> None:
        super().__init__()
        self.written = b""
        self.is_aborted = False
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True
        self._protocol.connection_lost(None)

    def deliver(self, data: bytes, sizes: Callable[[], int]) -> None:
        while data and not self.is_aborted:
            buffer = self._protocol.get_buffer(-1)
            taken = min(len(buffer), len(data), sizes())
            buffer[:taken] = data[:taken]
            data = data[taken:]
            self._protocol.buffer_updated(taken)


@settings(max_examples=60, deadline=None)
@given(
    bodies=st.lists(st.integers(0, 400_000) | st.integers(0, 300), min_size=1, max_size=6),
    chunks=st.lists(st.integers(1, 300_000) | st.integers(1, 40), min_size=1, max_size=20),
)
def test_answers_may_be_cut_anywhere(bodies: list[int], chunks: list[int]) -> None:
    async def run() -> None:
        connection = PullConnection("peer")
        pipe = Pipe(connection)
        asked = [asyncio.create_task(connection.request(PULL, 5)) for _ in bodies]
        await asyncio.sleep(0)
        replies = [
            encode(Command(0, opaque, 1, {"nextBeginOffset": str(opaque)}, bytes([opaque]) * size))
            for opaque, size in enumerate(bodies, 1)
        ]
        turns = iter(chunks * (1 + sum(map(len, replies)) // len(chunks)))
        pipe.deliver(b"".join(reversed(replies)), lambda: next(turns))
        for opaque, (task, size) in enumerate(zip(asked, bodies, strict=True), 1):
            reply = await task
            assert reply.ext_fields == {"nextBeginOffset": str(opaque)}
            assert reply.body == bytes([opaque]) * size

    asyncio.run(run())


async def test_requests_of_one_turn_leave_in_one_write() -> None:
    connection = PullConnection("peer")
    pipe = Pipe(connection)
    tasks = [asyncio.create_task(connection.request(PULL, 5)) for _ in range(3)]
    await asyncio.sleep(0)
    assert pipe.written == b""
    await asyncio.sleep(0)
    assert pipe.written == b"".join(encode(PULL, opaque) for opaque in (1, 2, 3))
    assert repr(connection) == "<PullConnection peer open asked=3>"
    connection.close()
    for task in tasks:
        with pytest.raises(ConnectionLost):
            await task


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x01\0\0\0\0", b"\0\0\0\x10\0\0\xff\xff"])
async def test_what_is_no_frame_ends_the_connection(garbage: bytes) -> None:
    connection = PullConnection("peer")
    pipe = Pipe(connection)
    task = asyncio.create_task(connection.request(PULL, 5))
    await asyncio.sleep(0)
    pipe.deliver(garbage, lambda: 100)
    with pytest.raises(ConnectionLost):
        await task
    with pytest.raises(TransportClosed):
        await connection.request(PULL, 5)


async def test_a_header_that_cannot_be_read_ends_the_connection() -> None:
    connection = PullConnection("peer")
    pipe = Pipe(connection)
    pipe.deliver(b"\0\0\0\x08\0\0\0\x04nope", lambda: 100)
    assert pipe.is_aborted


async def test_requests_of_a_peer_and_late_replies_are_passed_over() -> None:
    connection = PullConnection("peer")
    pipe = Pipe(connection)
    task = asyncio.create_task(connection.request(PULL, 5))
    await asyncio.sleep(0)
    pipe.deliver(encode(Command(40, 1)) + encode(Command(0, 99, 1)), lambda: 1 << 20)
    assert not task.done()
    pipe.deliver(encode(Command(19, 1, 1)), lambda: 1 << 20)
    assert (await task).code == 19


@asynccontextmanager
async def serving(handler: CommandHandler) -> AsyncIterator[tuple[Server, PullConnections, str]]:
    connections = PullConnections(2)
    async with Server(serve_commands(handler), limits=Limits(drain_seconds=0.1)) as server:
        yield server, connections, f"127.0.0.1:{server.port}"
        await connections.close()


async def test_a_connection_is_shared_and_made_anew_when_it_is_lost() -> None:
    def answer(command: Command, connection: Connection) -> Command:
        return command.reply(body=b"x" * 1_000_000)

    async with serving(answer) as (server, connections, address):
        replies = await asyncio.gather(*(connections.request(address, PULL, 5) for _ in range(4)))
        assert [len(reply.body) for reply in replies] == [1_000_000] * 4
        assert len(server.connections) == 1
        (first,) = server.connections
        first.abort()
        await first.wait_closed()
        async with asyncio.timeout(30):
            while True:
                try:
                    reply = await connections.request(address, PULL, 5)
                    break
                except (ConnectionLost, TransportClosed):  # until we have seen the end of the first
                    await asyncio.sleep(0)
        assert len(reply.body) == 1_000_000
        (second,) = server.connections
        assert second.peer != first.peer


async def test_no_answer_in_time_and_nobody_there() -> None:
    silent: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
    async with serving(lambda command, connection: silent) as (_, connections, address):
        with pytest.raises(RequestTimedOut, match="did not answer request 11"):
            await connections.request(address, PULL, 0.01)
        silent.set_result(None)
    with pytest.raises(ConnectFailed):
        await connections.request(address, PULL, 5)
    with pytest.raises(ConnectFailed, match="not an address"):
        await connections.request("nowhere", PULL, 5)
