"""Accepts connections, and tells TLS from plain by the first byte.

Without TLS a connection is handed on at once. With TLS it waits, as nothing but a socket, until the peer has sent its
first byte; the byte is looked at, not taken. A plain connection then goes on as if there were no TLS.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Any, Final

from downrange.transport.limits import Limits
from downrange.transport.tls import FIRST_BYTE, ServerTls, failure

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 64
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

TakePlain = Callable[[socket.socket, Any], object]
"""Takes a plain connection: its socket, which does not block, and the peer's address."""


class Acceptor:
    """Accepts the connections of one server, until `stop`.

    Holds always: a socket waits for its first byte, or is in a handshake, or was handed on; both waits end in time.
    Used on the loop's thread only.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        limits: Limits,
        tls: ServerTls | None = None,
        take_plain: TakePlain | None = None,
    ) -> None:
        """`make` makes the protocol of a connection of the event loop: TLS, and without `take_plain` all others."""
        self._make = make
        self._limits = limits
        self._tls = tls
        self._take_plain = take_plain or self._connect_plain
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._connecting: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Acceptor silent={len(self._silent)} connecting={len(self._connecting)}>"

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
        connecting = list(self._connecting)
        for task in connecting:
            task.cancel()
        await asyncio.gather(*connecting, return_exceptions=True)

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
            if self._tls is None:
                self._take_plain(accepted, peer)
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
            self._connect(accepted, peer, is_tls=True)
        elif self._tls.is_enforced:
            log.info("connection closed peer=%s:%s reason=plain, and tls.server.mode=enforcing", *peer[:2])
            accepted.close()
        else:
            self._take_plain(accepted, peer)

    # --- connections of the event loop --------------------------------------------------------------------------

    def _connect_plain(self, accepted: socket.socket, peer: Any) -> None:
        self._connect(accepted, peer, is_tls=False)

    def _connect(self, accepted: socket.socket, peer: Any, *, is_tls: bool) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            if task.cancelled():  # perhaps before its first step
                accepted.close()

        task = self._loop.create_task(self._connected(accepted, peer, self._tls if is_tls else None))
        self._connecting.add(task)
        task.add_done_callback(ended)

    async def _connected(self, accepted: socket.socket, peer: Any, tls: ServerTls | None) -> None:
        try:
            if tls is None:
                await self._loop.connect_accepted_socket(self._make, accepted)
            else:
                await self._loop.connect_accepted_socket(
                    self._make,
                    accepted,
                    ssl=tls.context(),
                    ssl_handshake_timeout=self._limits.handshake_seconds,
                    ssl_shutdown_timeout=self._limits.drain_seconds,
                )
        except OSError as error:
            reason = "slow handshake" if isinstance(error, ConnectionAbortedError) else failure(error)
            log.info("connection closed peer=%s:%s reason=%s", *peer[:2], reason)
            accepted.close()
