"""A network in memory: TCP as far as two programs can tell, with delays, blocked directions and lost connections.

    write ─▶ outbox of this end ─(latency; held while the direction is blocked)─▶ inbox of the peer ─▶ its protocol

Bytes of one direction arrive in order, in pieces of any size. A process that is killed resets its connections; a
machine that loses power says nothing, and answers with a reset what comes for old connections after it is up again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from contextvars import Context, copy_context
from math import log
from typing import Any, Final

from tests.sim.loop import Handle, SimLoop
from tests.sim.process import Machine, Process, State, current

HIGH_WATER: Final = 64 * 1024
LOW_WATER: Final = 16 * 1024
CUT_SHARE: Final = 0.02
"""Of what arrives at once, so much comes in two pieces."""
EOF: Final = object()
RESET: Final = object()
ANY_ADDRESS: Final = ("0.0.0.0", "", "::", "127.0.0.1", "localhost")
FIRST_FREE_PORT: Final = 20_000


class Listening:
    """A simulated listening socket."""

    def __init__(self, network: Network, host: str, port: int) -> None:
        self._network = network
        self.process = current()
        self.context = copy_context()
        address = self.process.machine.address
        self.place = (address, port or network.free_port())
        if network.listening(self.place) is not None:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.accept: Callable[[], asyncio.BaseProtocol] | None = None
        """Makes the protocol of a connection; None: not accepting yet."""
        network.places[self.place] = self

    def getsockname(self) -> tuple[str, int]:
        return self.place

    def close(self) -> None:
        if self._network.places.get(self.place) is self:
            del self._network.places[self.place]


class SimServer:
    """What `loop.create_server` gives: a listening socket that does not accept by itself."""

    def __init__(self, listening: Listening) -> None:
        self.sockets = [listening]

    def close(self) -> None:
        for one in self.sockets:
            one.close()

    async def wait_closed(self) -> None:
        pass


class SimAcceptor:
    """Stands for `transport.accepting.Acceptor`: accepts the connections of one server, without TLS."""

    def __init__(self, make: Callable[[], asyncio.BaseProtocol], *_: object, **__: object) -> None:
        self._make = make
        self._listening: list[Listening] = []

    def listen(self, listening: list[Listening]) -> None:
        self._listening = listening
        for one in listening:
            one.accept = self._make

    async def stop(self) -> None:
        for one in self._listening:
            one.close()
        self._listening = []
        await asyncio.sleep(0)


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, process: Process, context: Context, place: tuple[str, int]) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.context = context
        self.place = place
        self.peer: SimTransport  # set by the network
        self._protocol: asyncio.BaseProtocol | None = None
        self._is_buffered = False
        self._outbox: list[Any] = []
        self._is_on_way = False
        self._arrival = Handle(self._arrive, (), network.context)
        self._unsent = 0
        self._high, self._low = HIGH_WATER, LOW_WATER
        self._is_full = False
        self._is_closing = False
        self.is_lost = False
        self._is_paused = False
        self._inbox: list[Any] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self.peer.place, "sockname": self.place}.get(name, default)

    # --- sending ------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        size = len(data)
        if size and not self._is_closing:
            self._unsent += size
            self._outbox.append(bytes(data))
            if not self._is_on_way:
                self.send_outbox()
            if self._unsent > self._high and not self._is_full:
                self._is_full = True
                self._protocol.pause_writing()  # type: ignore[union-attr]

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is not None:
            self._high, self._low = high, high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent

    def _post(self, item: Any) -> None:
        self._outbox.append(item)
        self.send_outbox()

    def send_outbox(self) -> None:
        """Put what is waiting on its way, unless the direction is blocked or something is on its way already."""
        network = self.network
        if not self._outbox or self._is_on_way:
            return
        if not network.blocked or not network.is_blocked(self.process.machine, self.peer.process.machine):
            self._is_on_way = True
            network.loop.run_later(network.latency(), self._arrival)

    def _arrive(self) -> None:
        self._is_on_way = False
        items, self._outbox = self._outbox, []
        peer = self.peer
        process = peer.process
        if not items or not process.machine.is_up:
            return  # lost
        if peer.is_lost or process.state is State.DEAD:  # nobody has that end any more
            if not self.is_lost and items[-1] is not RESET:
                peer._post(RESET)
            return
        if process.is_at_full_speed:
            peer.context.run(peer._take, items)
        else:
            self.network.loop.call_soon(peer._take, items, context=peer.context)

    def _go_on_writing(self) -> None:
        """The peer has read, so there may be room again."""
        if self._unsent <= self._low and not self.is_lost:
            self._is_full = False
            self.network.loop.call_soon(self._protocol.resume_writing, context=self.context)  # type: ignore[union-attr]

    # --- receiving ----------------------------------------------------------------------------------------------

    def accepted(self, make: Callable[[], asyncio.BaseProtocol]) -> None:
        if not self._is_closing:
            protocol = make()
            self.set_protocol(protocol)
            protocol.connection_made(self)
            self._take([])

    def _take(self, items: list[Any]) -> None:
        is_held_up = self._inbox or self._is_paused or self._is_closing or self.is_lost or self._protocol is None
        if not is_held_up and len(items) == 1 and type(items[0]) is bytes:
            self._feed(items[0])
            return
        self._inbox += items
        while self._inbox and not self._is_paused and not self.is_lost and self._protocol is not None:
            if self._is_closing:
                self._inbox = [one for one in self._inbox if one is RESET]
                if not self._inbox:
                    break
            size = 0
            while size < len(self._inbox) and isinstance(self._inbox[size], bytes):
                size += 1
            if size:
                data = b"".join(self._inbox[:size])
                del self._inbox[:size]
                self._feed(data)
            else:
                self._end(self._inbox.pop(0))

    def _feed(self, data: bytes) -> None:
        peer = self.peer
        peer._unsent -= len(data)
        if peer._is_full:
            peer._go_on_writing()
        chance = self.network.chance
        cut = chance.randrange(len(data)) if chance.random() < CUT_SHARE else 0
        receive: Callable[[bytes], None] = self._fill if self._is_buffered else self._protocol.data_received  # type: ignore[union-attr]
        if cut:
            receive(data[:cut])
            data = data[cut:]
        if not self.is_lost:
            receive(data)

    def _fill(self, data: bytes) -> None:
        """Put bytes into the buffer of a `BufferedProtocol`."""
        protocol: Any = self._protocol
        rest = memoryview(data)
        while rest and not self.is_lost:
            buffer = memoryview(protocol.get_buffer(-1))
            size = min(len(buffer), len(rest))
            buffer[:size] = rest[:size]
            rest = rest[size:]
            protocol.buffer_updated(size)

    def _end(self, how: Any) -> None:
        if how is RESET:
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        elif not self._protocol.eof_received():  # type: ignore[union-attr]
            self.close()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.network.loop.call_soon(self._take, [], context=self.context)

    def is_reading(self) -> bool:
        return not self._is_paused

    # --- closing ------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._close(EOF, None)

    def abort(self) -> None:
        self._close(RESET, None)

    def _close(self, how: Any, error: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            if how is RESET:
                self._outbox.clear()
            self._post(how)
            self.network.loop.call_soon(self._lose, error, context=self.context)

    def _lose(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self.network.forget(self)
            if self._protocol is not None:
                self._protocol.connection_lost(error)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def lose_power(self) -> None:
        """What this end had written and not sent is gone with the memory of its machine."""
        self._outbox.clear()

    def reset_by_kernel(self) -> None:
        """The process of this end is gone; the kernel tells the peer."""
        self._outbox.clear()
        self._post(RESET)


class Network:
    """All machines, and what is between them."""

    def __init__(self, loop: SimLoop, chance: random.Random) -> None:
        self.loop = loop
        self.chance = chance
        self.context = Context()
        self.places: dict[tuple[str, int], Listening] = {}
        self.machines: dict[str, Machine] = {}
        self.transports: dict[SimTransport, None] = {}
        self.typical_seconds = 0.0005
        self.blocked: dict[tuple[Machine, Machine], None] = {}
        self._healed: asyncio.Future[None] = loop.create_future()
        self._ports = FIRST_FREE_PORT

    def free_port(self) -> int:
        self._ports += 10
        return self._ports

    def latency(self) -> float:
        return self.typical_seconds * (0.2 - log(1.0 - self.chance.random()))

    def listening(self, place: tuple[str, int]) -> Listening | None:
        found = self.places.get(place)
        return found if found is not None and found.process.state is not State.DEAD else None

    def forget(self, transport: SimTransport) -> None:
        self.transports.pop(transport, None)

    # --- faults -------------------------------------------------------------------------------------------------

    def is_blocked(self, source: Machine, target: Machine) -> bool:
        return (source, target) in self.blocked

    def block(self, source: Machine, target: Machine) -> None:
        """From now on nothing gets from one machine to another; what is on its way still arrives."""
        self.blocked[source, target] = None

    def unblock(self, source: Machine, target: Machine) -> None:
        if self.blocked.pop((source, target), 0) is None:
            for transport in list(self.transports):
                transport.send_outbox()
            healed, self._healed = self._healed, self.loop.create_future()
            healed.set_result(None)

    def between(self, one: Machine, other: Machine) -> list[SimTransport]:
        return [t for t in self.transports if t.process.machine is one and t.peer.process.machine is other]

    def lose(self, transport: SimTransport) -> None:
        """Break a connection: both ends find out, each in its time."""
        for end in (transport, transport.peer):
            end._outbox.clear()
            self.loop.call_later(self.latency(), end._take, [RESET], context=end.context)

    def killed(self, process: Process, *, silently: bool = False) -> None:
        """A process is gone; silently: with its machine."""
        for transport in [one for one in self.transports if one.process is process]:
            del self.transports[transport]
            if silently:
                transport.lose_power()
            else:
                transport.reset_by_kernel()
        for place in [place for place, one in self.places.items() if one.process is process]:
            del self.places[place]

    # --- what asyncio's loop offers -----------------------------------------------------------------------------

    async def create_server(self, _: object, host: str, port: int, **__: object) -> SimServer:
        return SimServer(Listening(self, host, port))

    async def create_connection(
        self, make: Callable[[], asyncio.BaseProtocol], host: str, port: int, **_: object
    ) -> tuple[SimTransport, asyncio.BaseProtocol]:
        process = current()
        here = process.machine
        there = self.machines.get(host)
        if there is None:
            raise OSError(errno.EHOSTUNREACH, f"no machine {host}")
        await self._travel(here, there)
        if not there.is_up:
            await self.loop.create_future()  # until the caller gives up
        listening = self.listening((host, port))
        client = SimTransport(self, process, copy_context(), (here.address, next(here.ports)))
        accepting = listening is not None and listening.accept is not None
        if listening is not None and listening.accept is not None:
            server = SimTransport(self, listening.process, listening.context, listening.place)
            client.peer, server.peer = server, client
            self.transports[server] = None
            self.loop.call_soon(server.accepted, listening.accept, context=listening.context)
        try:
            await self._travel(there, here)
        except asyncio.CancelledError:
            if accepting:
                client.is_lost = True
                client._post(RESET)
            raise
        if not accepting:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        protocol = make()
        client.set_protocol(protocol)
        self.transports[client] = None
        protocol.connection_made(client)
        client._take([])
        return client, protocol

    async def _travel(self, source: Machine, target: Machine) -> None:
        await asyncio.sleep(self.latency())
        while self.is_blocked(source, target):
            await asyncio.wait([self._healed])

    def install(self) -> None:
        """Be the network of the loop."""
        self.loop.create_server = self.create_server  # type: ignore[assignment,method-assign]
        self.loop.create_connection = self.create_connection  # type: ignore[assignment,method-assign]
