"""A connection without an event loop: the thread that asks writes to the socket and reads from it itself.

Going through the event loop costs a waiting thread two more switches between threads, each as long as the broker
takes for the whole request.
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import struct
import sys
from contextlib import suppress
from math import nan
from time import monotonic
from typing import Final

from downrange.protocol.framing import MAX_FRAME, Frame, FrameDecoder
from downrange.transport.errors import ConnectFailed
from downrange.transport.pool import split_address
from downrange.transport.tls import ClientTls, client_failure

MOST_BYTES: Final = 32 * 1024
"""The largest frame to send this way: a larger one might not fit the socket's buffer, and block for too long."""
_TIMEVAL: Final = struct.Struct("ll")
_LONGEST_SECONDS: Final = 1_000_000.0
_RECEIVE_BYTES: Final = 64 * 1024  # a reply has some 300, and there may be as many as threads


class DirectConnection:
    """One socket to one broker; used by one thread after the other (`shared_connection.py`).

    After an exception of `write_and_read` the connection must be closed. Any thread may call `cut` and `next_opaque`.
    """

    __slots__ = ("_decoder", "_has_tls", "_numbers", "_poll", "_seconds", "_socket", "address", "round_trip")

    def __init__(self, address: str, connect_seconds: float, tls: ClientTls | None = None) -> None:
        """Connect; raises ConnectFailed."""
        self.address = address
        self._numbers = itertools.count(1).__next__  # no two threads get the same
        host, port = split_address(address)
        begun = monotonic()
        try:
            self._socket = socket.create_connection((host, port), connect_seconds)
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {address}: {error.strerror or error}") from None
        self.round_trip = _round_trip(self._socket) or monotonic() - begun
        """Seconds to the broker's machine and back."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._has_tls = tls is not None
        if tls is not None:
            self._socket = _secured(self._socket, tls, address, host)
        else:
            # The kernel watches the time: Python's own time-outs take a system call more for each read and write.
            self._socket.settimeout(None)
        self._seconds = nan  # no limit is set yet
        self._decoder = FrameDecoder(max_header=MAX_FRAME)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def __repr__(self) -> str:
        return f"<DirectConnection {self.address}>"

    def is_quiet(self) -> bool:
        """Whether there is nothing to read, neither the end of the connection nor something unasked."""
        return not self._poll.poll(0) or (self._has_tls and self._holds_no_message())

    def _holds_no_message(self) -> bool:
        """Read what is there over TLS: it may concern TLS only, as the tickets that follow a handshake."""
        self._seconds = nan
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            pass
        return False

    def next_opaque(self) -> int:
        """The number of the next request."""
        return self._numbers() & 0x7FFFFFFF

    def write_and_read(self, frames: bytes, seconds: float) -> list[Frame]:
        """Write, and wait for replies. Returns no frame after about `seconds`, or when a frame is not whole yet.

        Raises OSError, and RemoteProtocolError for bytes that are no frame.
        """
        self._limit(seconds)
        if frames:
            try:
                self._socket.sendall(frames)
            except BlockingIOError:
                raise TimeoutError("it takes no more data") from None
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        if not data:
            raise ConnectionResetError("it was closed by the broker")
        decoder = self._decoder
        received = decoder.frames(data)
        if decoder.error is not None:
            raise decoder.error
        return received

    def cut(self) -> None:
        """End the wait of the thread in `write_and_read`, which then closes the connection."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not ssl's, which is for the reading thread only

    def close(self) -> None:
        self._socket.close()

    def _limit(self, seconds: float) -> None:
        """Set how long a read or write may take, unless the present limit is close: that saves two system calls."""
        if seconds * 0.5 <= self._seconds <= seconds * 1.02:
            return
        self._seconds = seconds
        if self._has_tls:  # OpenSSL does not know the kernel's limits
            self._socket.settimeout(seconds)
            return
        micros = max(1, int(min(seconds, _LONGEST_SECONDS) * 1_000_000))  # 0 would mean for ever
        value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _secured(plain: socket.socket, tls: ClientTls, address: str, host: str) -> socket.socket:
    try:
        return tls.context().wrap_socket(plain, server_hostname=host)
    except OSError as error:
        plain.close()
        raise ConnectFailed(f"cannot connect to {address}: {client_failure(error)}") from None


def _round_trip(connected: socket.socket) -> float:
    """Seconds, as the kernel measured them when the connection was made; 0 where it does not tell."""
    if sys.platform != "linux":
        return 0.0
    (micros,) = struct.unpack_from("I", connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72), 68)
    return float(micros) / 1_000_000
