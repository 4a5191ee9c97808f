"""A TCP proxy that makes a good network bad: slow, frozen, narrow, cut or closed, as a test tells it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from downrange.clock import Clock, SystemClock
from tests.support.lasting_port import lasting_port

CHUNK_BYTES: Final = 64 * 1024
HELD_BYTES: Final = 16 * 1024 * 1024
"""What one direction of a connection may hold; a sender that goes on meets back-pressure, as on a real network."""
RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST

Held = asyncio.Queue[tuple[float, bytes]]  # when to pass it on, and what; no bytes are the end of the stream


class Way:
    """What happens to bytes that go one way. May be changed at any moment; a delay holds for bytes that come later."""

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self.bytes_per_second: float | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()

    def __repr__(self) -> str:
        state = "flowing" if self._flowing.is_set() else "frozen"
        return f"<Way {state} delay={self.delay_seconds:g}s rate={self.bytes_per_second}>"

    def freeze(self) -> None:
        """Pass nothing on. Nobody is told: the connections stay open."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Pass on what was held, and all that follows."""
        self._flowing.set()

    async def is_flowing(self) -> None:
        await self._flowing.wait()

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Whole, or a twentieth of a second at a time."""
        size = len(data) if self.bytes_per_second is None else max(1, int(self.bytes_per_second / 20))
        for start in range(0, len(data), max(1, size)):
            yield data[start : start + size]


class FaultProxy:
    """Listens on `host`:`port` and passes every connection on to `server`, unchanged until a fault is switched on.

    Holds always: bytes of one direction keep their order, and an end of stream follows the last of them. A server
    that cannot be reached ends the client's connection with a reset. Used on one event loop.
    """

    def __init__(
        self, server: tuple[str, int], host: str = "127.0.0.1", port: int = 0, *, clock: Clock | None = None
    ) -> None:
        self.server = server
        self.host = host
        self.port = port or lasting_port()  # it may refuse for a while, and accept again
        self.to_server = Way()
        self.to_client = Way()
        self._clock = clock or SystemClock()
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        state = "refusing" if self._listener is None else f"{len(self._connections)} connections"
        return f"<FaultProxy {self.host}:{self.port} -> {self.server} {state}>"

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.refuse()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # --- faults ---------------------------------------------------------------------------------------------------

    async def accept(self) -> None:
        """Take connections, the first time and after `refuse`."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accepted, self.host, self.port, limit=CHUNK_BYTES)

    async def refuse(self) -> None:
        """Refuse new connections; those there are stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        """Reset every connection; what was held is lost. New ones are welcome."""
        for connection in self._connections:
            connection.cancel()

    def freeze(self) -> None:
        self.to_server.freeze()
        self.to_client.freeze()

    def thaw(self) -> None:
        self.to_server.thaw()
        self.to_client.thaw()

    # --- passing on -----------------------------------------------------------------------------------------------

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        to_server: asyncio.StreamWriter | None = None
        is_ended = False
        try:
            from_server, to_server = await asyncio.open_connection(*self.server, limit=CHUNK_BYTES)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(from_client, to_server, self.to_server))
                tasks.create_task(self._pass_on(from_server, to_client, self.to_client))
            is_ended = True
        except* OSError:
            pass  # one side is gone: so is the connection
        finally:
            for writer in (to_client, to_server):
                if writer is not None:
                    _close(writer, reset=not is_ended)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        held: Held = asyncio.Queue()
        held_bytes = 0
        has_room = asyncio.Event()
        has_room.set()

        async def take() -> None:
            nonlocal held_bytes
            while True:
                await has_room.wait()
                data = await reader.read(CHUNK_BYTES)
                held.put_nowait((self._clock.monotonic() + way.delay_seconds, data))
                if not data:
                    return
                held_bytes += len(data)
                if held_bytes >= HELD_BYTES:
                    has_room.clear()

        async def give() -> None:
            nonlocal held_bytes
            while True:
                due, data = await held.get()
                if (wait := due - self._clock.monotonic()) > 0:
                    await self._clock.sleep(wait)
                for piece in way.pieces(data):
                    if way.bytes_per_second is not None:
                        await self._clock.sleep(len(piece) / way.bytes_per_second)
                    await way.is_flowing()
                    writer.write(piece)
                    await writer.drain()
                if not data:
                    await way.is_flowing()
                    writer.write_eof()
                    return
                held_bytes -= len(data)
                has_room.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            tasks.create_task(give())


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        if (connected := writer.get_extra_info("socket")) is not None:  # None: the other side was faster
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()
