"""Accepts connections, and tells TLS from plain by the first byte.

Without TLS a connection is handed on at once. With TLS it waits, as nothing but a socket, until the peer has sent its
first byte; the byte is looked at, not taken. A plain connection then goes on as if there were no TLS.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, Final

from downrange.transport.limits import Limits
from downrange.transport.tls import FIRST_BYTE, ServerTls
from downrange.transport.tls_transport import TlsTransport

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 16
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Take = Callable[[socket.socket, Any, asyncio.Protocol], object]
"""Reads a connection from now on: its socket, which does not block, the peer's address, and the protocol for it."""


def duplicate(listening: socket.socket) -> socket.socket:
    """A socket of our own for what an event loop listens on. uvloop's sockets have no `dup`."""
    return socket.socket(fileno=os.dup(listening.fileno()))


class Acceptor:
    """Accepts the connections of one server, until `stop`.

    Holds always: a socket waits for its first byte, or is in a handshake, or its protocol has it; both waits end in
    time. Used on the loop's thread only.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        limits: Limits,
        tls: ServerTls | None = None,
        *,
        make_over_tls: Callable[[], asyncio.Protocol] | None = None,
        take: Take | None = None,
    ) -> None:
        """`make` makes the protocol of a connection. Without `take` the event loop's transports are used."""
        self._make = make
        self._limits = limits
        self._tls = tls
        self._make_over_tls = make_over_tls or make
        self._take = take or self._take_by_loop
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: dict[TlsTransport, Any] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Acceptor silent={len(self._silent)} handshakes={len(self._handshakes)}>"

    def listen(self, listening: list[socket.socket]) -> None:
        """Accept connections from now on; the sockets belong to the acceptor."""
        self._listening = listening
        for one in listening:
            one.setblocking(False)
            one.listen(_BACKLOG)
            self._loop.add_reader(one, self._accept, one)

    async def stop(self) -> None:
        """Accept no more, and close the connections that were not handed on."""
        for one in self._listening:
            self._loop.remove_reader(one)
            one.close()
        self._listening = []
        for accepted in list(self._silent):
            self._forget(accepted)
            accepted.close()
        for transport in list(self._handshakes):
            transport.abort()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await asyncio.sleep(0)  # the sockets of these handshakes are closed in this turn of the loop

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("no connection can be accepted reason=%s", error.strerror)
                self._loop.remove_reader(listening)
                self._loop.call_later(_PAUSE_SECONDS, self._accept_again, listening)
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._limits.unacknowledged_seconds is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
                millis = int(self._limits.unacknowledged_seconds * 1000)
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, millis)
            if self._tls is None:
                self._take(accepted, peer, self._make())
            else:
                self._wait_for_first_byte(accepted, peer)

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    # --- the first byte -----------------------------------------------------------------------------------------

    def _wait_for_first_byte(self, accepted: socket.socket, peer: Any) -> None:
        self._silent[accepted] = self._loop.call_later(self._limits.idle_seconds, self._give_up, accepted, peer)
        self._loop.add_reader(accepted, self._look, accepted, peer)

    def _give_up(self, accepted: socket.socket, peer: Any) -> None:
        log.info("connection closed peer=%s:%s reason=idle", *peer[:2])
        self._forget(accepted)
        accepted.close()

    def _forget(self, accepted: socket.socket) -> None:
        self._loop.remove_reader(accepted)
        self._silent.pop(accepted).cancel()

    def _look(self, accepted: socket.socket, peer: Any) -> None:
        assert self._tls is not None
        try:
            first = accepted.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        self._forget(accepted)
        if not first:
            accepted.close()
        elif first[0] == FIRST_BYTE:
            self._begin_handshake(accepted, peer, self._tls)
        elif self._tls.is_enforced:
            log.info("connection closed peer=%s:%s reason=plain, and tls.server.mode=enforcing", *peer[:2])
            accepted.close()
        else:
            self._take(accepted, peer, self._make())

    # --- the handshake ------------------------------------------------------------------------------------------

    def _begin_handshake(self, accepted: socket.socket, peer: Any, tls: ServerTls) -> None:
        above = self._make_over_tls()
        transport = TlsTransport(tls.context(), above, self._limits.handshake_seconds, self._end_handshake)
        self._handshakes[transport] = peer
        self._take(accepted, peer, transport)

    def _end_handshake(self, transport: TlsTransport, why_failed: str | None) -> None:
        peer = self._handshakes.pop(transport)
        if why_failed is not None:
            log.info("connection closed peer=%s:%s reason=%s", *peer[:2], why_failed)

    def _take_by_loop(self, accepted: socket.socket, peer: Any, protocol: asyncio.Protocol) -> None:
        task = self._loop.create_task(self._connected(accepted, protocol))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connected(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, accepted)
        except OSError as error:  # the peer has gone already
            log.info("connection closed reason=%s", error)
            accepted.close()
