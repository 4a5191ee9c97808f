"""Connections for pulls only, which receive the body of an answer into its final buffer, whatever its size.

The ordinary connection of a client (transport/connection.py) copies a large frame three times; with answers of a
megabyte this took longer than turning them into columns.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

from downrange.protocol.command import Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import MAX_FRAME, MAX_HEADER, PREFIX, decode_frame, encode
from downrange.transport.errors import ConnectionLost, TransportClosed
from downrange.transport.outstanding import Outstanding
from downrange.transport.pool import open_link
from downrange.transport.tls import ClientTls

log = logging.getLogger(__name__)

_HEAD_BYTES: Final = 2 * MAX_HEADER
"""Space for the longest header; small answers fit completely, often several at a time."""


class PullConnection(asyncio.BufferedProtocol):
    """One connection to one process of a broker.

    Holds always: every request ends exactly once, with its reply, a time-out or ConnectionLost. Either a body is being
    received, or the bytes in `_head` begin with a frame. Used on the loop's thread only.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._asked = Outstanding(self._loop, lambda: None)
        self._asked.peer = peer
        self._opaque = 0
        self._out: list[bytes] = []
        self._head = memoryview(bytearray(_HEAD_BYTES))
        self._filled = 0
        self._body: bytearray | None = None
        self._received = 0
        self._unfinished = 0, b""

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<PullConnection {self._peer} {state} asked={len(self._asked.requests)}>"

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def request(self, command: Command, timeout: float) -> Command:
        """Send a request and wait for its reply, whatever its code. The body of the reply is one buffer."""
        if self._transport is None or self._transport.is_closing():
            raise TransportClosed(f"connection to {self._peer} is closed")
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        waiter: asyncio.Future[Command] = self._loop.create_future()
        self._send(encode(command, opaque))
        self._asked.add(opaque, waiter, command.code, timeout)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._asked.forget_given_up()
            raise

    def _send(self, frame: bytes) -> None:
        """Queue a frame; one write, the largest cost of a pull, sends all frames queued in one turn of the loop."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- called by the loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        reason = f": {error}" if error else ""
        self._asked.fail_all(lambda: ConnectionLost(f"connection to {self._peer} was lost{reason}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._body is not None:
            return memoryview(self._body)[self._received :]
        return self._head[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._body is None:
                self._filled += nbytes
                self._take_frames()
            else:
                self._received += nbytes
                if self._received == len(self._body):
                    body, self._body = self._body, None
                    self._deliver(*self._unfinished, body)
        except RemoteProtocolError as error:
            log.warning("connection closed peer=%s reason=%s", self._peer, error)
            self.close()

    def _take_frames(self) -> None:
        head, filled = self._head, self._filled
        at = 0
        while filled - at >= PREFIX.size:
            length, mark = PREFIX.unpack_from(head, at)
            header_length = mark & 0xFFFFFF
            if not 4 + header_length <= length <= MAX_FRAME - 4 or header_length > MAX_HEADER:
                raise RemoteProtocolError(f"header of {header_length} bytes in a frame of {length}")
            body_at = at + PREFIX.size + header_length
            end = at + 4 + length
            if body_at > filled:
                break
            header = bytes(head[at + PREFIX.size : body_at])
            if end > filled:
                self._body = bytearray(end - body_at)
                self._received = filled - body_at
                self._body[: self._received] = head[body_at:filled]
                self._unfinished = mark >> 24, header
                at = filled
                break
            self._deliver(mark >> 24, header, bytes(head[body_at:end]))
            at = end
        self._filled = filled - at
        if at:
            head[: self._filled] = head[at:filled]

    def _deliver(self, serialize_type: int, header: bytes, body: bytes | bytearray) -> None:
        reply = decode_frame((serialize_type, header, cast(bytes, body)))
        if not reply.is_response:  # brokers send no requests to a client without heartbeats
            return
        asked = self._asked.requests.pop(reply.opaque, None)
        if asked is not None and not asked[0].done():
            asked[0].set_result(reply)


class PullConnections:
    """The connections of one task by address, made when first needed and after a loss. Used on one event loop."""

    def __init__(self, connect_timeout: float, tls: ClientTls | None = None) -> None:
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._open: dict[str, PullConnection] = {}
        self._connecting: dict[str, asyncio.Task[PullConnection]] = {}

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        connection = self._open.get(address)
        if connection is None or not connection.is_open:
            connection = await self._connected(address)
        return await connection.request(command, timeout)

    async def _connected(self, address: str) -> PullConnection:
        attempt = self._connecting.get(address)
        if attempt is None:
            attempt = self._connecting[address] = asyncio.create_task(self._connect(address))
            attempt.add_done_callback(lambda task: self._end_attempt(address, task))
        # Several pulls share the attempt: cancelling one of them must not cancel it for the others.
        return await asyncio.shield(attempt)

    async def _connect(self, address: str) -> PullConnection:
        connection = await open_link(lambda: PullConnection(address), address, self._connect_timeout, self._tls)
        self._open[address] = connection
        return connection

    def _end_attempt(self, address: str, task: asyncio.Task[PullConnection]) -> None:
        self._connecting.pop(address, None)
        if not task.cancelled():
            task.exception()  # pulls that wait get the exception; this only marks it as retrieved

    async def close(self) -> None:
        """Close every connection. Pulls under way end with ConnectionLost."""
        attempts = list(self._connecting.values())
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        for connection in self._open.values():
            connection.close()
        self._open.clear()
        await asyncio.sleep(0)  # the sockets are closed in this turn of the loop
