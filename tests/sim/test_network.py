"""The simulated network keeps what TCP promises, and nothing that a machine without power could not keep."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from tests.sim.loop import SimLoop, sleep
from tests.sim.network import Listening, Network, SimAcceptor, SimTransport
from tests.sim.process import Machine, Process, SimClock


class Notes(asyncio.Protocol):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.data = b""
        self.error: Exception | None = None

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.error = error


class Pair:
    """A client and a server, each on a machine of its own, with one connection."""

    def __init__(self) -> None:
        self.loop = SimLoop(random.Random(1))
        self.network = Network(self.loop, random.Random(2))
        self.network.install()
        self.client, self.server = (self._process(name) for name in ("client", "server"))
        self.seen = Notes()
        self.accepted: list[SimTransport] = []

    def _process(self, name: str) -> Process:
        machine = Machine(name, f"10.0.0.{len(self.network.machines) + 1}", SimClock(self.loop, sleep))
        self.network.machines[machine.address] = machine
        return Process(name, machine, self.loop)

    async def connect(self) -> SimTransport:
        accepted = self.accepted

        class Serving(Notes):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, SimTransport)
                accepted.append(transport)

        async def serve() -> None:
            SimAcceptor(Serving).listen([Listening(self.network, "", 7)])

        await self.server.start(serve())
        opened = self.network.create_connection(lambda: self.seen, self.server.machine.address, 7)
        transport, _ = await self.client.start(opened)
        assert isinstance(transport, SimTransport)
        return transport


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.loop.close()


def test_bytes_that_were_written_before_a_power_cut_do_not_come_after_it(pair: Pair) -> None:
    async def story() -> None:
        transport = await pair.connect()
        here, there = pair.client.machine, pair.server.machine
        pair.network.block(there, here)
        pair.accepted[0].write(b"of the time before")
        pair.server.kill()
        there.is_up = False
        pair.network.killed(pair.server, silently=True)
        pair.network.unblock(there, here)
        there.is_up = True
        transport.write(b"are you there?")
        await asyncio.sleep(1)

    pair.loop.run_until_complete(story())
    assert pair.seen.data == b""
    assert isinstance(pair.seen.error, ConnectionResetError)


def test_bytes_that_a_blocked_direction_held_come_when_it_is_open_again(pair: Pair) -> None:
    async def story() -> None:
        await pair.connect()
        here, there = pair.client.machine, pair.server.machine
        pair.network.block(there, here)
        pair.accepted[0].write(b"late")
        await asyncio.sleep(1)
        assert pair.seen.data == b""
        pair.network.unblock(there, here)
        await asyncio.sleep(1)

    pair.loop.run_until_complete(story())
    assert pair.seen.data == b"late"
    assert pair.seen.error is None
