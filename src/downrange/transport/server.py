"""Accept connections and hand their requests to one handler."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from downrange.compiled import steps
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.connection import Connection
from downrange.transport.errors import listen_failed
from downrange.transport.handler import Express, Handler, Together
from downrange.transport.limits import Limits, Usage

if TYPE_CHECKING:
    from downrange.transport.sockets import Sockets

log = logging.getLogger(__name__)


class Server:
    """A listening socket and the connections it accepted.

    `async with Server(handler, host, port) as server:` serves until the block ends, then drains.
    """

    def __init__(
        self,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
        on_close: Callable[[Connection], None] | None = None,
        drain_seconds: float = 5.0,
        busy_poll: BusyPoll | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.connections: set[Connection] = set()
        self.limits = limits or Limits()
        self.usage = Usage()
        self.handler = handler
        self.express: Express | None = None
        self.together: Together | None = None
        self._tls = tls
        self.on_close = on_close
        self._drain_seconds = drain_seconds
        self._busy_poll = busy_poll
        self._listening: asyncio.Server | None = None
        self._sockets: Sockets | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Server {self.host}:{self.port} connections={len(self.connections)} {self.usage!r}>"

    async def bind(self) -> None:
        """Take the address, so that `port` is known, without accepting anybody yet."""
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                self._accept, self.host, self.port, ssl=self._tls, backlog=1024, start_serving=False
            )
        except OSError as error:
            raise listen_failed(self.host, self.port, error) from None
        self.port = self._listening.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Accept connections."""
        if self._listening is None:
            await self.bind()
        assert self._listening is not None
        try:
            if self._tls is None and steps is not None and hasattr(steps, "Sockets"):
                self._read_together(self._listening)
            else:
                await self._listening.start_serving()
        except OSError as error:
            raise listen_failed(self.host, self.port, error) from None
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def _read_together(self, bound: asyncio.Server) -> None:
        from downrange.transport.sockets import Sockets  # it exists only where the compiled module does

        self._sockets = Sockets(self._accept, self.together, self.limits, self.usage, self._busy_poll)
        self._sockets.listen([socket.socket(fileno=os.dup(one.fileno())) for one in bound.sockets])

    async def stop(self) -> None:
        """Stop accepting, answer what is in flight, close every connection."""
        if self._listening is None:
            return
        self._listening.close()
        if self._sockets is not None:
            self._sockets.stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self.connections:
            await asyncio.gather(*(connection.drain(self._drain_seconds) for connection in list(self.connections)))
        await self._listening.wait_closed()
        if self._sockets is not None:
            self._sockets.close()
        self._listening = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _accept(self) -> Connection:
        return Connection(
            self.handler,
            express=self.express,
            limits=self.limits,
            usage=self.usage,
            on_open=self.connections.add,
            on_close=self._closed,
            busy_poll=self._busy_poll,
        )

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.on_close is not None:
            self.on_close(connection)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        pause = min(self.limits.idle_seconds, self.limits.frame_seconds, 20.0) / 2
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in list(self.connections):
                connection.expire(now)
