"""All plain TCP connections of a server, read and answered together.

A chunk that brings one request costs more for being a chunk than for the request. With many connections that have one
request on its way each, all chunks are like that. So whatever has come over all of them by the time we look is
received in one go, and the requests that need no `Command` to be made of them are handled as if they had come in one
chunk. Needs the compiled module; without it, and for TLS, the loop's own transports are used.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Final

from downrange.compiled import steps
from downrange.protocol.framing import MAX_FRAME, MAX_HEADER, Frame
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.connection import Connection
from downrange.transport.handler import Replies, Together
from downrange.transport.limits import Limits, Usage
from downrange.transport.socket_transport import SocketTransport

log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 64
# Who asks for something unusual, as consumers do, is likely to go on with it.
_ALONE: Final = 16
_PAUSE_SECONDS: Final = 1.0
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Sockets:
    """Accepts, reads and answers. Holds always: the frames of one connection are handled in the order they came."""

    def __init__(
        self,
        connection: Callable[[], Connection],
        together: Together | None,
        limits: Limits,
        usage: Usage,
        poll: BusyPoll | None,
    ) -> None:
        self._connection = connection
        self._together = together
        self._limits = limits
        self._usage = usage
        self._poll = poll
        self._loop = asyncio.get_running_loop()
        self._watched: steps.Sockets[SocketTransport] = steps.Sockets(MAX_FRAME - 4, MAX_HEADER)
        self._receive = self._watched.receive
        self._listening: list[socket.socket] = []
        self._loop.add_reader(self._watched.fileno(), self.look)
        if poll is not None:
            poll.looks.append(self.look)

    # --- accepting ----------------------------------------------------------------------------------------------

    def listen(self, listening: list[socket.socket]) -> None:
        """Accept connections from now on."""
        self._listening = listening
        for one in listening:
            one.setblocking(False)
            one.listen(_BACKLOG)
            self._loop.add_reader(one, self._accept, one)

    def stop_listening(self) -> None:
        for one in self._listening:
            self._loop.remove_reader(one)
            one.close()
        self._listening = []

    def close(self) -> None:
        self._loop.remove_reader(self._watched.fileno())
        self._watched.close()
        if self._poll is not None:
            self._poll.looks.remove(self.look)

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
            SocketTransport(self._watched, accepted, peer, self._connection())

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    # --- reading ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Handle what has come."""
        received = self._receive()
        if received is None:
            return
        frames, transports, hosts, others = received
        if frames:
            if transports[0] is transports[-1] and len(frames) > 1:  # who sends many is served as well alone
                self._hand_over(frames, transports[0])
            else:
                self._take(frames, transports, hosts)
        for transport, what in others:
            try:
                if what is None:
                    transport.writable()
                elif isinstance(what, int):
                    transport.end(OSError(what, os.strerror(what)))
                elif what and not transport.is_closing():
                    transport.received(what)
                elif not what:
                    transport.close()
            except Exception as error:
                self._broke(transport, error)

    def _take(self, frames: list[Frame], transports: list[SocketTransport], hosts: list[bytes]) -> None:
        # As long as all connections together wait for no more answers than one may, none of them waits for too many.
        together = self._together if self._usage.requests < self._limits.max_requests_per_connection else None
        now = self._loop.time()
        at = 0
        while at < len(frames):
            taken = None
            first = transports[at]
            if together is not None and not first.chunks_alone:
                try:
                    taken = together(frames, at, hosts, now)
                except Exception:
                    # A bug. Nothing was carried out, so each alone: only whom it hits there, too, is closed.
                    log.exception("requests of %d connections cannot be taken together", len(set(transports[at:])))
                    together = None
            if taken is None:
                end = at + 1
                while end < len(frames) and transports[end] is first:
                    end += 1
                first.chunks_alone = (first.chunks_alone or _ALONE) - 1
                self._hand_over(frames[at:end], first)
            else:
                requests, replies, silent = taken
                end = at + requests
                self._answer(transports[at:end], replies, silent, now)
            at = end

    def _answer(self, transports: list[SocketTransport], replies: Replies, silent: list[int], now: float) -> None:
        """Requests of these were taken together."""
        for transport in transports:
            transport.protocol.last_received = now
        last = transports[-1]
        requests = len(transports)
        for position in reversed(silent):
            del transports[position]
        if isinstance(replies, bytes):
            self._reply(transports, replies)
        elif isinstance(replies, Exception):
            self._all_broke(transports, replies)
        else:
            for transport in transports:
                transport.protocol.begin_answering(1)
            replies.add_done_callback(partial(self._reply_later, transports))
        if self._poll is not None:
            self._poll.answered(last.protocol, requests)

    def _reply(self, transports: list[SocketTransport], replies: bytes) -> None:
        try:
            for transport, rest in steps.send_frames(transports, replies):
                transport.write(rest)
        except Exception as error:
            self._all_broke(transports, error)

    def _reply_later(self, transports: list[SocketTransport], replies: asyncio.Future[bytes]) -> None:
        for transport in transports:
            transport.protocol.end_answering(1)
        if not replies.cancelled():
            self._reply(transports, replies.result())

    def _hand_over(self, frames: list[Frame], transport: SocketTransport) -> None:
        """Frames of one connection, that came together, to be handled by it alone."""
        try:
            transport.protocol.frames_received(frames)
        except Exception as error:
            self._broke(transport, error)

    def _broke(self, transport: SocketTransport, error: Exception) -> None:
        """A bug. It must not cost other connections what was received of theirs."""
        log.error("connection closed peer=%s reason=a bug", transport.protocol.peer, exc_info=error)
        transport.end(error)

    def _all_broke(self, transports: list[SocketTransport], error: Exception) -> None:
        """A bug, behind requests that were carried out: who asked is left to find out, and to ask again if need be."""
        asked = set(transports)
        log.error("%d connections closed reason=their requests cannot be answered", len(asked), exc_info=error)
        for transport in asked:
            transport.end(error)
