"""A connection for threads that wait: the thread that asks writes to the socket and reads from it itself.

Going through the event loop costs a waiting thread two more switches between threads, each as long as the broker
takes for the whole request.
"""

from __future__ import annotations

import select
import socket
import struct
from contextlib import suppress
from math import nan
from time import monotonic
from typing import Final

from downrange.protocol.framing import MAX_FRAME, Frame, FrameDecoder
from downrange.transport.errors import ConnectFailed, ConnectionLost, RequestTimedOut
from downrange.transport.pool import split_address

MOST_BYTES: Final = 32 * 1024
"""Larger frames might not fit the socket's buffer, and sending them would take longer than was allowed."""
_TIMEVAL: Final = struct.Struct("ll")
_LONGEST_SECONDS: Final = 1_000_000.0
_RECEIVE_BYTES: Final = 4096  # a reply has some 300


class DirectConnection:
    """One socket to one broker, for one request at a time; used by one thread after the other.

    Holds always: between two requests nothing is left to be read. Whoever gets an exception from `ask` closes the
    connection, because the reply may still come. `cut` may be called by another thread meanwhile.
    """

    __slots__ = ("_decoder", "_poll", "_seconds", "_socket", "address", "opaque")

    def __init__(self, address: str, connect_seconds: float) -> None:
        """Connect; raises ConnectFailed."""
        self.address = address
        self.opaque = 0
        """What the last request is known by; the next takes the next number."""
        try:
            self._socket = socket.create_connection(split_address(address), connect_seconds)
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {address}: {error.strerror or error}") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel watches the time: Python's own time-outs take a system call more for each read and write.
        self._socket.settimeout(None)
        self._seconds = nan  # no limit is set yet
        self._decoder = FrameDecoder(max_header=MAX_FRAME)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def __repr__(self) -> str:
        return f"<DirectConnection {self.address} opaque={self.opaque}>"

    def is_quiet(self) -> bool:
        """Whether it can be used: a broker that closed it, or says something unasked, is heard."""
        return not self._poll.poll(0)

    def next_opaque(self) -> int:
        opaque = self.opaque = (self.opaque + 1) & 0x7FFFFFFF
        return opaque

    def ask(self, frame: bytes, code: int, seconds: float) -> Frame:
        """Send a request and wait for the frame that comes next. Raises ConnectionLost, RequestTimedOut."""
        begun = monotonic()
        left = seconds
        try:
            while True:
                if left != self._seconds:
                    self._limit(left)
                if frame:
                    self._socket.sendall(frame)
                    frame = b""
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ConnectionLost(f"connection to {self.address} was lost")
                frames = self._decoder.frames(data)
                if len(frames) == 1 and not self._decoder.buffered:
                    return frames[0]
                if frames or self._decoder.error is not None:
                    why = self._decoder.error or "it says more than one thing at a time"
                    raise ConnectionLost(f"connection to {self.address} was closed: {why}")
                left = seconds - (monotonic() - begun)
        except (BlockingIOError, TimeoutError):
            raise RequestTimedOut(f"{self.address} did not answer request {code} within {seconds:.3g} s") from None
        except OSError as error:
            raise ConnectionLost(f"connection to {self.address} was lost: {error.strerror or error}") from None

    def cut(self) -> None:
        """Let the thread that waits for a reply wait no longer. It closes the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _limit(self, seconds: float) -> None:
        """How long a read or write may take from now on."""
        if seconds <= 0:
            raise TimeoutError
        self._seconds = seconds
        micros = max(1, int(min(seconds, _LONGEST_SECONDS) * 1_000_000))  # 0 would mean for ever
        value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
