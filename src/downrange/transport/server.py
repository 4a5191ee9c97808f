"""Accept connections and serve their requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from downrange.compiled import steps
from downrange.transport.accepting import Acceptor, duplicate
from downrange.transport.connection import Connection
from downrange.transport.errors import listen_failed
from downrange.transport.limits import Limits
from downrange.transport.serving import Endpoint, Serve
from downrange.transport.tls import ServerTls

READS_TOGETHER: Final = hasattr(steps, "Sockets")
"""Whether plain TCP connections are read together (sockets.py); it takes the compiled module and Linux."""
if READS_TOGETHER:
    from downrange.transport.sockets import Sockets, TlsSocket

log = logging.getLogger(__name__)


class Server(Endpoint):
    """A listening socket and the connections it accepted.

    `async with Server(serve, host, port) as server:` serves until the block ends, then drains. `serve`, `on_close` and
    `busy_poll` may be set until `start`.
    """

    def __init__(
        self,
        serve: Serve,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        limits: Limits | None = None,
        tls: ServerTls | None = None,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        super().__init__(serve, limits=limits)
        self.host = host
        self.port = port
        self.on_close = on_close
        self.connections: set[Connection] = set()
        self.tls = tls
        self._listening: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        self._sockets: Sockets | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Server {self.host}:{self.port} connections={len(self.connections)} {self.usage!r}>"

    async def bind(self) -> None:
        """Take the address, so that `port` is known, without accepting connections yet."""
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(
                self._accept, self.host, self.port, backlog=1024, start_serving=False
            )
        except OSError as error:
            raise listen_failed(self.host, self.port, error) from None
        self.port = self._listening.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Accept connections."""
        if self._listening is None:
            await self.bind()
        assert self._listening is not None
        make_over_tls, take = None, None
        if READS_TOGETHER:
            self._sockets = Sockets(self)
            make_over_tls, take = self._accept_beside_sockets, self._sockets.take
        self._acceptor = Acceptor(self._accept, self.limits, self.tls, make_over_tls=make_over_tls, take=take)
        try:
            self._acceptor.listen([duplicate(one) for one in self._listening.sockets])
        except OSError as error:
            raise listen_failed(self.host, self.port, error) from None
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        """Stop accepting, wait for the replies under way, close every connection."""
        if self._listening is None:
            return
        self._listening.close()
        if self._acceptor is not None:
            await self._acceptor.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self.connections:
            seconds = self.limits.drain_seconds
            await asyncio.gather(*(connection.drain(seconds) for connection in list(self.connections)))
        await self._listening.wait_closed()
        if self._sockets is not None:
            self._sockets.close()
        self._listening = None

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _accept(self) -> Connection:
        return Connection(self, on_open=self.connections.add, on_close=self._closed)

    def _accept_beside_sockets(self) -> Connection:
        """A connection over TLS whose bytes `Sockets` receives: it is served and answered together with plain ones."""
        assert self._sockets is not None
        connection = self._accept()
        connection.deliver = self._sockets.deliver
        connection.socket = TlsSocket(connection)
        return connection

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
