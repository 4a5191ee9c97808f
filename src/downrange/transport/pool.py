"""The connections of a client, by address: opened when first needed, shared, and opened again after a loss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from downrange.model.text import Text, said_by
from downrange.protocol.command import Command
from downrange.protocol.framing import MAX_FRAME, FrameDecoder
from downrange.transport.connection import Connection
from downrange.transport.errors import ConnectFailed, TransportClosed
from downrange.transport.limits import Limits
from downrange.transport.serving import Endpoint, ReplyReader, Serve, refuse_all
from downrange.transport.tls import ClientTls, client_failure

P = TypeVar("P", bound=asyncio.BaseProtocol)

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, cut at the last colon; `[::1]:9876` works too."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
        raise ConnectFailed(Text("not an address: '{address}'; expected host:port", address=address))
    try:
        host.encode("idna")  # the look-up does the same, but would raise UnicodeError
    except UnicodeError:
        raise ConnectFailed(Text("not an address: '{address}'; no host can have this name", address=address)) from None
    return host.removeprefix("[").removesuffix("]"), int(port)


async def connect(
    address: str,
    endpoint: Endpoint | None = None,
    *,
    timeout: float = 3.0,
    tls: ClientTls | None = None,
    on_close: Callable[[Connection], None] | None = None,
) -> Connection:
    """One connection to `address`, which belongs to `endpoint`."""

    def make() -> Connection:
        # Replies to large batches list every message id in their header, so a client takes headers of any legal size.
        return Connection(endpoint, decoder=FrameDecoder(max_header=MAX_FRAME), on_close=on_close)

    return await open_link(make, address, timeout, tls)


async def open_link(make: Callable[[], P], address: str, timeout: float, tls: ClientTls | None = None) -> P:
    """The protocol that `make` makes, connected to `address`; raises ConnectFailed."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout):
            context = None if tls is None else tls.context()
            return (await asyncio.get_running_loop().create_connection(make, host, port, ssl=context))[1]
    except TimeoutError:
        raise ConnectFailed(
            Text("cannot connect to {address}: no answer within {timeout:g} s", address=address, timeout=timeout)
        ) from None
    except OSError as error:
        reason = error.strerror or error if tls is None else client_failure(error)
        raise ConnectFailed(Text("cannot connect to {address}: {reason}", address=address, reason=reason)) from None


@dataclass(slots=True)
class _Attempt:
    """The failures in a row at one address, and the time of the next try."""

    failures: int = 0
    next_try: float = 0.0
    error: ConnectFailed | None = None


class Pool(Endpoint):
    """The connections of one client process, one per address.

    Holds always: at most one connection and one attempt to connect per address. After a failed attempt an address
    pauses, longer each time: asking for its connection then fails at once, so that a caller can try another address.
    """

    def __init__(
        self,
        serve: Serve = refuse_all,
        *,
        read_replies: ReplyReader | None = None,
        connect_timeout: float = 3.0,
        tls: ClientTls | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(serve, read_replies=read_replies, limits=limits)
        self._connect_timeout = connect_timeout
        self.tls = tls
        self._connections: dict[str, Connection] = {}
        self.known = self._connections.get
        """The last connection to an address, open or closed. The dict's own method, because every send calls it."""
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
            raise TransportClosed(Text("this client is closed"))
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
        """Connect if need be, send the request, wait for its reply; `timeout` covers all of it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                connection = await self.get(address)
        except TimeoutError:
            raise ConnectFailed(
                Text("cannot connect to {address}: no answer within {timeout:g} s", address=address, timeout=timeout)
            ) from None
        try:
            return await connection.request(command, deadline - loop.time())
        except TransportClosed as closed:
            if self._is_closed:
                raise
            raise ConnectFailed(Text("{closed}; the request was not sent", closed=said_by(closed))) from None

    async def oneway(self, address: str, command: Command, timeout: float = 3.0) -> None:
        """Connect if need be, wait until the peer reads, send."""
        connection = await self.get(address)
        await connection.wait_writable(timeout)
        connection.oneway(command)

    def drop(self, address: str) -> None:
        """Close the connection to an address that is not needed any more."""
        connection = self._connections.get(address)
        if connection is not None:
            connection.close()
        self._attempts.pop(address, None)

    def forgive(self, address: str) -> None:
        """Try an address again at once: there is news that its server is back."""
        if address not in self._connecting:
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

        connection = await connect(address, self, timeout=self._connect_timeout, tls=self.tls, on_close=forget)
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
