"""Accepts connections on one port: HTTP/2 as it is, or inside TLS, as the first byte of a client says."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Final

from downrange.proxy.http2.connection import Http2Connection, OnCall
from downrange.proxy.http2.limits import Http2Limits
from downrange.transport.accepting import Acceptor
from downrange.transport.errors import listen_failed
from downrange.transport.limits import Limits
from downrange.transport.tls import ServerTls

log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 1.0


class Http2Server:
    """A listening socket and its connections."""

    def __init__(
        self,
        on_call: OnCall,
        host: str,
        port: int,
        *,
        tls: ServerTls | None = None,
        limits: Http2Limits | None = None,
    ) -> None:
        """Without `tls`, TLS connections are closed."""
        self.host = host
        self.port = port
        self.connections: set[Http2Connection] = set()
        self._on_call = on_call
        self._tls = tls
        self._limits = limits or Http2Limits()
        self._listening: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Http2Server {self.host}:{self.port} connections={len(self.connections)}>"

    async def bind(self) -> None:
        """Take the address, so that `port` is known, without accepting connections yet."""
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(self._make, self.host, self.port, start_serving=False)
        except OSError as error:
            raise listen_failed(self.host, self.port, error) from None
        self.port = self._listening.sockets[0].getsockname()[1]

    def start(self) -> None:
        """Accept connections."""
        assert self._listening is not None
        first_byte = self._limits.preface_seconds
        self._acceptor = Acceptor(self._make, Limits(idle_seconds=first_byte, handshake_seconds=first_byte), self._tls)
        self._acceptor.listen([socket.socket(fileno=os.dup(one.fileno())) for one in self._listening.sockets])
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    async def stop(self) -> None:
        """Accept no more, tell clients to go elsewhere, and close their connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listening is not None:
            self._listening.close()
        if self._acceptor is not None:
            await self._acceptor.stop()
        ending = list(self.connections)
        for connection in ending:
            connection.end()
        if ending:
            await asyncio.wait([connection.lost for connection in ending], timeout=_STOP_SECONDS)
        for connection in list(self.connections):
            connection.abort()

    def _make(self) -> Http2Connection:
        return Http2Connection(self._on_call, self.connections, self._limits)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        pause = min(self._limits.idle_seconds, self._limits.ping_seconds) / 4
        while True:
            await asyncio.sleep(pause)
            for connection in list(self.connections):
                connection.expire(loop.time())
