"""address -> connection: made when first needed, shared by all, made again when lost, with growing pauses."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, TransportClosed
from downrange.transport.handler import Handler, refuse
from downrange.transport.limits import Limits, Usage

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 3.0


def split_address(address: str) -> tuple[str, int]:
    """`host:port`, cut at the last colon; `[::1]:9876` is taken too."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConnectFailed(f"not an address: {address!r}; expected host:port")
    try:
        host.encode("idna")  # as the look-up does, where it would not be an error of ours
    except UnicodeError:
        raise ConnectFailed(f"not an address: {address!r}; no host can have this name") from None
    return host.removeprefix("[").removesuffix("]"), int(port)


async def connect(
    address: str,
    handler: Handler = refuse,
    *,
    timeout: float = 3.0,
    tls: ssl.SSLContext | None = None,
    limits: Limits | None = None,
    usage: Usage | None = None,
    on_close: Callable[[Connection], None] | None = None,
) -> Connection:
    """One connection to `address`; `handler` answers what the peer asks."""
    host, port = split_address(address)

    def make() -> Connection:
        # Replies to large batches list every message id in their header, so a client takes headers of any legal size.
        decoder = FrameDecoder(max_header=MAX_FRAME)
        return Connection(handler, limits=limits, usage=usage, decoder=decoder, on_close=on_close)

    try:
        async with asyncio.timeout(timeout):
            _, connection = await asyncio.get_running_loop().create_connection(make, host, port, ssl=tls)
    except TimeoutError:
        raise ConnectFailed(f"cannot connect to {address}: no answer within {timeout:g} s") from None
    except OSError as error:
        raise ConnectFailed(f"cannot connect to {address}: {error.strerror or error}") from None
    return connection


class _Attempt:
    """Failures in a row at one address, and when the next try is due."""

    __slots__ = ("error", "failures", "next_try")

    def __init__(self) -> None:
        self.failures = 0
        self.next_try = 0.0
        self.error: ConnectFailed | None = None


class Pool:
    """The connections of one client process, one per address.

    Holds always: at most one connection and one attempt to connect per address. While an address pauses after a failed
    attempt, asking for it fails at once with that attempt's error, so that a caller can go to another address instead.
    """

    def __init__(
        self,
        handler: Handler = refuse,
        *,
        connect_timeout: float = 3.0,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        on_close: Callable[[str], None] | None = None,
    ) -> None:
        self._handler = handler
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._limits = limits or Limits()
        self._usage = Usage()
        self._on_close = on_close
        self._connections: dict[str, Connection] = {}
        self.known = self._connections.get
        """The last connection to an address, open or not; asked for every send, so without a function of ours."""
        self._connecting: dict[str, asyncio.Task[Connection]] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Pool {sorted(self._connections)} {'closed' if self._is_closed else 'open'}>"

    async def get(self, address: str) -> Connection:
        """The open connection to `address`, made if need be."""
        connection = self._connections.get(address)
        if connection is not None and connection.is_open:
            return connection
        if self._is_closed:
            raise TransportClosed("this client is closed")
        attempt = self._connecting.get(address)
        if attempt is None:
            self._raise_while_pausing(address)
            attempt = asyncio.create_task(self._connect(address))
            self._connecting[address] = attempt
            attempt.add_done_callback(lambda task: self._finish(address, task))
        # Several callers share the attempt: one that is cancelled must not cancel it for the others.
        return await asyncio.shield(attempt)

    def connected(self, address: str) -> Connection | None:
        """The open connection to `address`, if there is one."""
        connection = self._connections.get(address)
        return connection if connection is not None and connection.is_open else None

    async def request(self, address: str, command: Command, timeout: float) -> Command:
        """Connect if need be, ask, wait; `timeout` covers both."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                connection = await self.get(address)
        except TimeoutError:
            raise ConnectFailed(f"cannot connect to {address}: no answer within {timeout:g} s") from None
        return await connection.request(command, deadline - loop.time())

    async def oneway(self, address: str, command: Command, timeout: float = 3.0) -> None:
        """Connect if need be, wait until the peer reads, send."""
        connection = await self.get(address)
        await connection.wait_writable(timeout)
        connection.oneway(command)

    def drop(self, address: str) -> None:
        """Close the connection to an address nobody needs any more."""
        connection = self._connections.get(address)
        if connection is not None:
            connection.close()
        self._attempts.pop(address, None)

    async def close(self, drain_seconds: float = 1.0) -> None:
        """Close every connection after sending what is queued."""
        self._is_closed = True
        connecting = list(self._connecting.values())
        for attempt in connecting:
            attempt.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)
        await asyncio.gather(*(connection.drain(drain_seconds) for connection in list(self._connections.values())))

    async def _connect(self, address: str) -> Connection:
        def forget(connection: Connection) -> None:
            if self._connections.get(address) is connection:
                del self._connections[address]
            if self._on_close is not None:
                self._on_close(address)

        connection = await connect(
            address,
            self._handler,
            timeout=self._connect_timeout,
            tls=self._tls,
            limits=self._limits,
            usage=self._usage,
            on_close=forget,
        )
        self._connections[address] = connection
        return connection

    def _raise_while_pausing(self, address: str) -> None:
        attempt = self._attempts.get(address)
        if attempt is not None and attempt.error is not None and asyncio.get_running_loop().time() < attempt.next_try:
            raise ConnectFailed(str(attempt.error))

    def _finish(self, address: str, task: asyncio.Task[Connection]) -> None:
        self._connecting.pop(address, None)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConnectFailed):
            attempt = self._attempts.setdefault(address, _Attempt())
            pause = min(FIRST_PAUSE * 2**attempt.failures, LONGEST_PAUSE)
            attempt.failures = min(attempt.failures + 1, 16)
            attempt.next_try = asyncio.get_running_loop().time() + pause
            attempt.error = error
        else:
            self._attempts.pop(address, None)
