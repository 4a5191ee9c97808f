"""The frames that one connection has yet to send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from downrange.protocol.command import Buffer
from downrange.transport.errors import TransportClosed
from downrange.transport.limits import Limits, Usage

if TYPE_CHECKING:
    from downrange.transport.socket_transport import SocketTransport

log = logging.getLogger(__name__)

# Frames up to this size together are joined before they are written: the copy is cheaper than a gathering write.
_JOIN_BELOW: Final = 32 * 1024
# Replies are queued and leave in one write, up to this much: small requests may have big replies.
_FLUSH_ABOVE: Final = 256 * 1024


class Output:
    """Queues frames, and writes them.

    Holds always: frames leave in the order they were queued; a peer that leaves too much unread is cut off. Used by its
    connection only.
    """

    __slots__ = (
        "_limits",
        "_loop",
        "_parts",
        "_size",
        "_time",
        "_transport",
        "_unsent",
        "_usage",
        "is_full",
        "is_scheduled",
        "last_sent",
        "peer",
        "socket",
        "why_closed",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, usage: Usage) -> None:
        self.peer = "?"
        self.is_full = False
        """The socket takes no more for now."""
        self.is_scheduled = False
        """The loop will call `flush` at the end of its turn."""
        self.last_sent = 0.0
        self.socket: SocketTransport | None = None
        """The transport, if `Sockets` reads the connection: other frames may be sent past this queue then."""
        self.why_closed = ""
        """How the peer broke the protocol; it is another kind of server than the caller thinks."""
        self._loop = loop
        self._time = loop.time
        self._limits = limits
        self._usage = usage
        self._transport: asyncio.Transport | None = None
        self._parts: list[Buffer] = []
        self._size = 0
        self._unsent = 0

    def open(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def raise_if_closed(self) -> None:
        if self._transport is None or self._transport.is_closing():
            raise TransportClosed(f"connection to {self.peer} is closed{self.why_closed}")

    def send(self, frame: Buffer) -> None:
        """Queue a frame that leaves at the end of the loop's turn; raises TransportClosed."""
        if self._transport is None or self._transport.is_closing():  # not by a call: this runs for every send
            self.raise_if_closed()
        self._parts.append(frame)
        self._size += len(frame)
        if not self.is_scheduled:
            self._schedule()

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """Queue a frame in parts that leaves at the end of the loop's turn; raises TransportClosed."""
        self.raise_if_closed()
        self.add_parts(parts)
        if not self.is_scheduled:
            self._schedule()

    def add_parts(self, parts: Sequence[Buffer]) -> None:
        """Queue a frame in parts; the caller calls `write` afterwards. When much is queued it leaves at once."""
        self._parts += parts
        for part in parts:
            self._size += len(part)
        if self._size > _FLUSH_ABOVE:
            self.write()

    def _schedule(self) -> None:
        self.is_scheduled = True
        self._loop.call_soon(self.flush)
        if self.socket is not None:
            self.socket.has_queued = True

    def flush(self) -> None:
        """Write all queued frames, and note that the peer is active if it reads."""
        self.write()
        if not self.is_full:
            self.last_sent = self._time()

    def write(self, frames: Buffer = b"") -> None:
        """Write all queued frames, and `frames` behind them, at once."""
        if self.is_scheduled:
            self.is_scheduled = False
            if self.socket is not None:
                self.socket.has_queued = False
        parts = self._parts
        if parts:
            if frames:
                parts.append(frames)
            size, self._parts, self._size = self._size + len(frames), [], 0
        else:
            size = len(frames)
        if not size or self._transport is None or self._transport.is_closing():
            return
        if not parts:
            self._transport.write(frames)
        elif len(parts) == 1:
            self._transport.write(parts[0])
        elif size <= _JOIN_BELOW:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        if self.is_full:
            self._check_unsent()

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.is_full = True
        self._check_unsent()

    def resume(self) -> None:
        """The socket takes more, because the peer has read."""
        self.is_full = False
        self.last_sent = self._time()
        self._count_unsent(0)

    def close(self) -> None:
        """The connection is closed: nothing will be sent any more."""
        self._count_unsent(0)
        self._parts, self._size = [], 0
        self._transport = self.socket = None

    def _check_unsent(self) -> None:
        assert self._transport is not None
        self._count_unsent(self._transport.get_write_buffer_size())
        limits = self._limits
        if self._unsent > limits.max_unsent_bytes_per_connection or self._usage.unsent_bytes > limits.max_unsent_bytes:
            log.warning("connection closed peer=%s reason=it does not read, unsent_bytes=%d", self.peer, self._unsent)
            self._transport.abort()

    def _count_unsent(self, unsent: int) -> None:
        self._usage.unsent_bytes += unsent - self._unsent
        self._unsent = unsent
