"""What one connection has yet to send."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from downrange.protocol.command import Buffer
from downrange.transport.errors import TransportClosed
from downrange.transport.limits import Limits, Usage

log = logging.getLogger(__name__)

# Buffers up to this size are joined before writing: one copy is cheaper than another entry of a gathering write.
_JOIN_BELOW: Final = 32 * 1024
# Requests of one chunk are answered in one write, up to this much: small requests may have big replies.
_FLUSH_ABOVE: Final = 256 * 1024


class Output:
    """Queues frames, and writes them.

    Holds always: frames leave in the order they came; all that is queued in one turn of the loop leaves in one write,
    unless it is much; a peer that leaves too much unsent is cut off. Used by its connection only.
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
        "why_closed",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, usage: Usage) -> None:
        self.peer = "?"
        self.is_full = False
        """The socket takes no more for now."""
        self.is_scheduled = False
        """Somebody will flush: the loop at the end of its turn, or whoever has said so."""
        self.last_sent = 0.0
        self.why_closed = ""
        """What the peer sent that is no frame: then it is another kind of server than the caller thinks."""
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
        """Queue a frame; raises TransportClosed."""
        if self._transport is None or self._transport.is_closing():  # without a call more, for every send
            self.raise_if_closed()
        self._parts.append(frame)
        self._size += len(frame)
        if not self.is_scheduled:
            self.is_scheduled = True
            self._loop.call_soon(self.flush)

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """The same for one in parts."""
        self.raise_if_closed()
        self.add_parts(parts)
        if not self.is_scheduled:
            self.is_scheduled = True
            self._loop.call_soon(self.flush)

    def add(self, frame: Buffer) -> None:
        """Queue a frame; whoever does so flushes afterwards."""
        self._parts.append(frame)
        self._size += len(frame)

    def add_parts(self, parts: Sequence[Buffer]) -> None:
        self._parts += parts
        for part in parts:
            self._size += len(part)

    def flush(self) -> None:
        """Write what is queued."""
        self.write()
        if not self.is_full:
            self.last_sent = self._time()

    def flush_much(self) -> None:
        """The same if that is much; the rest waits for whom it waited for."""
        if self._size > _FLUSH_ABOVE:
            is_scheduled = self.is_scheduled
            self.flush()
            self.is_scheduled = is_scheduled

    def write(self) -> bool:
        """`flush` for who knows that the peer is there; False when there was nothing to write."""
        self.is_scheduled = False
        parts, size = self._parts, self._size
        if not parts:
            return False
        self._parts, self._size = [], 0
        if not size or self._transport is None or self._transport.is_closing():
            return False
        if len(parts) == 1:
            self._transport.write(parts[0])
        elif size <= _JOIN_BELOW:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        if self.is_full:
            self._check_unsent()
        return True

    def pause(self) -> None:
        """The socket takes no more for now."""
        self.is_full = True
        self._check_unsent()

    def resume(self) -> None:
        self.is_full = False
        self._count_unsent(0)

    def close(self) -> None:
        """The connection is gone."""
        self._count_unsent(0)
        self._parts, self._size = [], 0

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
