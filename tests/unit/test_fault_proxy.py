"""The proxy that integration tests break networks with: it must break what it is told to, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from downrange.clock import ManualClock
from tests.support import fault_proxy
from tests.support.fault_proxy import FaultProxy


class Peer:
    """One end of a connection, with what it has received so far."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.received = bytearray()
        self.error: OSError | None = None
        self.has_ended = False
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(1 << 16):
                self.received += data
        except OSError as error:
            self.error = error
        self.has_ended = True

    async def close(self) -> None:
        self.writer.transport.abort()
        self._reading.cancel()
        await asyncio.wait([self._reading])


class Fixture:
    """A proxy, its stopped clock, the server behind it and whoever connected."""

    def __init__(self, proxy: FaultProxy, clock: ManualClock, server: asyncio.Server, accepted: list[Peer]) -> None:
        self.proxy = proxy
        self.clock = clock
        self.server = server
        self.accepted = accepted
        self.clients: list[Peer] = []

    async def connect(self) -> tuple[Peer, Peer]:
        """A client and the server's end of its connection."""
        count = len(self.accepted)
        client = Peer(*await asyncio.open_connection("127.0.0.1", self.proxy.port))
        self.clients.append(client)
        await until(lambda: len(self.accepted) > count)
        return client, self.accepted[-1]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def turns(count: int = 30) -> None:
    """Enough turns of the loop for bytes to come through, if they come."""
    for _ in range(count):
        await asyncio.sleep(0.001)


@pytest.fixture
async def net() -> AsyncIterator[Fixture]:
    async with wired() as fixture:
        yield fixture


@asynccontextmanager
async def wired() -> AsyncIterator[Fixture]:
    accepted: list[Peer] = []
    server = await asyncio.start_server(lambda reader, writer: accepted.append(Peer(reader, writer)), "127.0.0.1", 0)
    clock = ManualClock()
    async with FaultProxy(("127.0.0.1", server.sockets[0].getsockname()[1]), clock=clock) as proxy:
        fixture = Fixture(proxy, clock, server, accepted)
        yield fixture
        for peer in (*fixture.clients, *accepted):
            await peer.close()
    server.close()


async def test_bytes_pass_unchanged_in_both_directions_and_so_does_the_end(net: Fixture) -> None:
    client, server = await net.connect()
    question, answer = b"q" * 300_000, bytes(range(256)) * 2000
    client.writer.write(question)
    client.writer.write_eof()
    await until(lambda: server.has_ended)
    assert server.received == question
    server.writer.write(answer)
    server.writer.write_eof()
    await until(lambda: client.has_ended)
    assert client.received == answer
    assert client.error is None


async def test_a_delay_holds_back_one_direction_only(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.to_client.delay_seconds = 0.8
    client.writer.write(b"question")
    await until(lambda: server.received == b"question")
    server.writer.write(b"answer")
    await turns()
    await net.clock.advance(0.79)
    await turns()
    assert client.received == b""
    await net.clock.advance(0.02)
    await until(lambda: client.received == b"answer")


async def test_bytes_that_are_delayed_keep_their_order_when_the_delay_ends(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.to_server.delay_seconds = 1
    client.writer.write(b"one ")
    await turns()
    net.proxy.to_server.delay_seconds = 0
    client.writer.write(b"two")
    await turns()
    assert server.received == b""
    await net.clock.advance(1)
    await until(lambda: server.received == b"one two")


async def test_a_delay_does_not_become_longer_when_much_is_under_way(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.to_client.delay_seconds = 1
    for number in range(200):
        server.writer.write(b"%03d" % number)
        await asyncio.sleep(0)
        net.clock.tick(0.001)
    await turns()
    await net.clock.advance(1.001)
    await until(lambda: client.received == b"".join(b"%03d" % number for number in range(200)))


async def test_a_sender_meets_back_pressure_when_too_much_is_held(
    net: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_proxy, "HELD_BYTES", 100_000)
    client, server = await net.connect()
    net.proxy.freeze()
    data = bytes(20_000_000)
    client.writer.write(data)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.writer.drain()
    net.proxy.thaw()
    await client.writer.drain()
    await until(lambda: len(server.received) == len(data))


async def test_frozen_connections_stay_open_and_go_on_when_thawed(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.freeze()
    client.writer.write(b"question")
    server.writer.write(b"answer")
    await turns()
    assert (len(client.received), len(server.received), client.has_ended) == (0, 0, False)
    net.proxy.thaw()
    await until(lambda: client.received == b"answer" and server.received == b"question")


async def test_a_narrow_way_passes_so_many_bytes_a_second(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.to_server.bytes_per_second = 1000
    client.writer.write(bytes(500))
    await turns()
    for _ in range(5):
        await net.clock.advance(0.05)
        await turns(5)
    assert 200 <= len(server.received) <= 250
    for _ in range(6):
        await net.clock.advance(0.05)
        await turns(5)
    await until(lambda: len(server.received) == 500)


async def test_cut_resets_what_is_there_and_lets_new_connections_in(net: Fixture) -> None:
    client, server = await net.connect()
    net.proxy.cut()
    await until(lambda: client.has_ended and server.has_ended)
    assert isinstance(client.error, ConnectionResetError)
    again, _ = await net.connect()
    assert not again.has_ended


async def test_refuse_keeps_connections_and_refuses_new_ones_until_accept(net: Fixture) -> None:
    client, server = await net.connect()
    await net.proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", net.proxy.port)
    client.writer.write(b"still here")
    await until(lambda: server.received == b"still here")
    await net.proxy.accept()
    await net.connect()


async def test_a_server_that_is_gone_ends_the_connection(net: Fixture) -> None:
    net.server.close()
    client = Peer(*await asyncio.open_connection("127.0.0.1", net.proxy.port))
    await until(lambda: client.has_ended)
    await client.close()


async def test_nothing_is_left_afterwards() -> None:
    before = asyncio.all_tasks()
    async with wired() as net:
        await net.connect()
        net.proxy.freeze()
        net.clients[0].writer.write(b"held")
        await turns()
    await until(lambda: asyncio.all_tasks() == before)
