"""The transport of one plain TCP connection that is read together with all others of its server (sockets.py)."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import TYPE_CHECKING, Any, Final, cast

from downrange.compiled import steps
from downrange.protocol.command import Buffer

if TYPE_CHECKING:
    from downrange.transport.connection import Connection

HIGH_WATER: Final = 64 * 1024
LOW_WATER: Final = HIGH_WATER // 4
"""The protocol is paused when more bytes are unsent, and resumed when no more are: as by asyncio's transports."""
_MOST_PARTS: Final = 1024  # the kernel takes no more in one gathering write


class _Gone:
    """The protocol of a transport that has ended. Late replies are handed to it, and dropped."""

    def write(self, frames: Buffer) -> None:
        pass


_GONE: Final = _Gone()


class SocketTransport(steps.Socket):
    """The methods of `asyncio.Transport` that a `Connection` uses.

    Holds always: bytes leave in the order they were written; the loop calls `connection_lost` exactly once.
    Used on the loop's thread only.
    """

    __slots__ = (
        "_accepted",
        "_is_closing",
        "_is_paused",
        "_loop",
        "_peer",
        "_reads",
        "_unsent",
        "_watched",
        "protocol",
    )

    def __init__(
        self,
        watched: steps.Sockets[SocketTransport],
        accepted: socket.socket,
        peer: tuple[Any, ...],
        protocol: Connection,
    ) -> None:
        self.descriptor = accepted.fileno()
        self.is_gathered = True
        self.protocol = protocol
        self._accepted = accepted
        self._peer = peer
        self._watched = watched
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._reads = True
        self._is_paused = self._is_closing = False
        protocol.socket_made(self)
        try:
            self._watch()
        except OSError as error:  # the kernel lacks the memory to watch another socket
            self.end(error)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "peername":
                return self._peer
            case "sockname":
                return self._accepted.getsockname()
        return default

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        if self._is_closing:
            return
        if self.is_full:
            self._keep(data)
            return
        try:
            sent = self.send(data)
        except OSError as error:
            self.end(error)
            return
        if sent < len(data):
            self._keep(memoryview(data)[sent:])

    def writelines(self, parts: list[Buffer]) -> None:
        sent = 0
        if not self.is_full and not self._is_closing:
            try:
                sent = self._accepted.sendmsg(parts[:_MOST_PARTS], (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self.end(error)
        for part in parts:
            if sent < len(part):
                self.write(memoryview(part)[sent:])
                sent = 0
            else:
                sent -= len(part)

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def _keep(self, data: Buffer) -> None:
        self._unsent += data
        if not self.is_full:
            self.is_full = True
            self._watch()
        if len(self._unsent) > HIGH_WATER and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()

    def writable(self) -> None:
        """The kernel takes more."""
        try:
            sent = self.send(self._unsent)
        except OSError as error:
            self.end(error)
            return
        del self._unsent[:sent]
        if not self._unsent:
            self.is_full = False
            if self._is_closing:
                self.end(None)
                return
            self._watch()
        if self._is_paused and len(self._unsent) <= LOW_WATER:
            self._is_paused = False
            self.protocol.resume_writing()

    # --- reading ------------------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self._reads = False
        self._watch()

    def resume_reading(self) -> None:
        self._reads = True
        self._watch()

    def _watch(self) -> None:
        if self.descriptor >= 0:
            reads = self._reads and not self._is_closing
            self._watched.watch(self, (select.EPOLLIN if reads else 0) | (select.EPOLLOUT if self.is_full else 0))

    # --- the end ------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Send the bytes that wait, then end."""
        if not self._is_closing:
            self._is_closing = True
            if self.is_full:
                self._watch()
            else:
                self.end(None)

    def abort(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """End at once; the protocol is told why."""
        if self.descriptor < 0:
            return
        self._watched.watch(self, 0)
        self.descriptor = -1
        self._is_closing = True
        self._unsent.clear()
        self._loop.call_soon(self._tell, error)

    def _tell(self, error: Exception | None) -> None:
        try:
            self.protocol.connection_lost(error)
        finally:
            self._accepted.close()
            self.protocol = cast("Connection", _GONE)  # a connection holds its transport, even when it is closed
