"""All connections of a server, read together.

A chunk with a single request costs more for being a chunk than for the request, and with many connections that have one
request under way each, all chunks are like that. So everything that has come over all connections is received in one
call, and all whole frames are served in one go; those of connections over TLS in a second one, after decryption. Needs
the compiled module and Linux; elsewhere the event loop's own transports are used.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from typing import Any, cast

from downrange.compiled import steps
from downrange.protocol.framing import MAX_FRAME, MAX_HEADER, Frame
from downrange.transport.connection import Connection
from downrange.transport.serving import Endpoint, close_for_bug
from downrange.transport.socket_transport import SocketTransport


class TlsSocket(steps.Socket):
    """Stands for a connection over TLS where replies to plain connections and to others are sent together.

    It has no descriptor, so `send_frames` hands the frames for it back, and the connection itself writes them. The
    connection holds it, and whoever sends holds the connection.
    """

    __slots__ = ("_protocol",)

    def __init__(self, protocol: Connection) -> None:
        self._protocol = weakref.ref(protocol)

    @property
    def protocol(self) -> Connection:
        protocol = self._protocol()
        assert protocol is not None
        return protocol


class Sockets:
    """Reads connections. Holds always: frames of one connection are served in the order they came."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._watched: steps.Sockets[SocketTransport] = steps.Sockets(MAX_FRAME - 4, MAX_HEADER)
        self._receive = self._watched.receive
        self._loop.add_reader(self._watched.fileno(), self.look)
        self._is_looking = False
        self._frames: list[Frame] = []
        self._origins: list[Connection] = []
        self._poll = endpoint.busy_poll
        if self._poll is not None:
            self._poll.looks.append(self.look)

    def take(self, accepted: socket.socket, peer: Any, protocol: asyncio.Protocol) -> None:
        """Read a connection that was accepted, from now on. The protocol is a `Connection`, or TLS below one."""
        SocketTransport(self._watched, accepted, peer, cast(Connection, protocol))

    def deliver(self, frames: list[Frame], origins: list[Connection]) -> None:
        """Serve frames of a connection over TLS: now, or while `look` runs, together with those of the others."""
        if self._is_looking:
            self._frames += frames
            self._origins += origins
        else:
            self._endpoint.deliver(frames, origins)

    def close(self) -> None:
        self._loop.remove_reader(self._watched.fileno())
        self._watched.close()
        if self._poll is not None:
            self._poll.looks.remove(self.look)

    # --- reading ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Serve everything that has come."""
        received = self._receive()
        if received is None:
            return
        frames, transports, others = received
        if frames:
            first, now = transports[0].protocol, self._time()
            if transports[-1] is transports[0]:  # each connection was read once, so all frames are of this one
                first.last_received = now
                origins = [first] * len(frames)
            else:
                origins = [transport.protocol for transport in transports]
                for origin in origins:
                    origin.last_received = now
            self._endpoint.deliver(frames, origins)
        if others:
            self._take_others(others)

    def _take_others(self, others: list[tuple[SocketTransport, bytes | int | None]]) -> None:
        """Bytes that are not whole frames of plain connections, and all other events."""
        self._is_looking = True
        for transport, what in others:
            try:
                if what is None:
                    transport.writable()
                elif isinstance(what, int):
                    transport.end(OSError(what, os.strerror(what)))
                elif what and not transport.is_closing():
                    transport.protocol.data_received(what)
                elif not what:
                    transport.close()
            except Exception as error:  # a bug, which must not cost other connections their bytes
                close_for_bug([transport.protocol], error)
        self._is_looking = False
        if self._frames:
            frames, origins, self._frames, self._origins = self._frames, self._origins, [], []
            self._endpoint.deliver(frames, origins)
