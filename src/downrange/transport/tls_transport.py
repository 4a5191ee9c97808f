"""TLS between a plain transport and a protocol: the server's side of one connection.

Not the event loop's own TLS, because that has a buffer of 256 KiB for each connection, does not tell a peer why it was
refused, and cannot read connections together (sockets.py).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from downrange.protocol.command import Buffer
from downrange.transport.tls import failure

if TYPE_CHECKING:
    from downrange.transport.socket_transport import SocketTransport

log = logging.getLogger(__name__)

_RECORD: Final = 16 * 1024
"""OpenSSL encrypts so much at a time, and reads no more."""
_JOIN_BELOW: Final = 64 * 1024
"""Parts of a write that are smaller together share their records."""


class TlsTransport(asyncio.Protocol):
    """A protocol for the plain transport below it, and a transport for the protocol above it.

    Holds always: the protocol above is told of the connection after the handshake, or never; `ended` is called once,
    when the handshake has ended, with the reason for which it failed or None. Used on the loop's thread only.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        above: asyncio.Protocol,
        handshake_seconds: float,
        ended: Callable[[TlsTransport, str | None], None],
    ) -> None:
        self._above = above
        self._ended = ended
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._below: asyncio.Transport | None = None
        self._is_ready = False
        self._is_closing = False
        self._limit: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(
            handshake_seconds, self._fail, "slow handshake"
        )

    def __repr__(self) -> str:
        return f"<TlsTransport {self._tls.version()} {'ready' if self._is_ready else 'handshake'}>"

    # --- what the plain transport calls -------------------------------------------------------------------------

    def socket_made(self, socket: SocketTransport) -> None:
        """`connection_made` by `Sockets`, which must not look for frames in these bytes."""
        socket.is_gathered = False
        self.connection_made(cast(asyncio.BaseTransport, socket))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._below = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        try:
            if not self._is_ready and not self._shake_hands():
                return
            received, is_end = self._decrypted()
        except ssl.SSLError as error:
            self._send_encrypted()  # an alert tells the peer the reason
            self._fail(failure(error))
            return
        if self._outgoing.pending:  # an answer of TLS itself, such as new keys
            self._send_encrypted()
        if received:
            self._above.data_received(received)
        if is_end:
            self.close()

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_encrypted()
            return False
        self._send_encrypted()
        self._is_ready = True
        self._end_handshake(None)
        self._above.connection_made(cast(asyncio.BaseTransport, self))
        return True

    def _decrypted(self) -> tuple[bytes, bool]:
        """All that can be read now, and whether the peer will send no more."""
        tls, incoming = self._tls, self._incoming
        parts: list[bytes] = []
        try:
            while True:
                part = tls.read(_RECORD)
                if not part:
                    return b"".join(parts), True
                parts.append(part)
                if not incoming.pending and not tls.pending():  # spares an exception, nearly always
                    break
        except ssl.SSLWantReadError:
            pass
        return parts[0] if len(parts) == 1 else b"".join(parts), False

    def pause_writing(self) -> None:
        if self._is_ready:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._is_ready:
            self._above.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._end_handshake("it closed the connection during the TLS handshake")
        if self._is_ready:
            self._above.connection_lost(error)

    def _fail(self, reason: str) -> None:
        if self._is_ready:
            log.info("connection closed peer=%s reason=%s", self.get_extra_info("peername"), reason)
        self._end_handshake(reason)
        self.abort()

    def _end_handshake(self, reason: str | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._ended(self, reason)

    # --- what the protocol calls: the methods of `asyncio.Transport` that it uses ---------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        return default if self._below is None else self._below.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if self._below is not None:
            self._below.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return 0 if self._below is None else self._below.get_write_buffer_size()

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, parts: list[Buffer] | tuple[Buffer, ...]) -> None:
        if self._is_closing:
            return
        if len(parts) > 1 and sum(map(len, parts)) <= _JOIN_BELOW:
            parts = (b"".join(parts),)
        write = self._tls.write
        try:
            for part in parts:
                written = write(part)
                if written < len(part):
                    view = memoryview(part)
                    while written < len(part):
                        written += write(view[written:])
        except ssl.SSLError:  # the peer has broken TLS, and the connection ends
            self.abort()
            return
        self._send_encrypted()

    def _send_encrypted(self) -> None:
        if self._below is not None and self._outgoing.pending:
            self._below.write(self._outgoing.read())

    def pause_reading(self) -> None:
        assert self._below is not None
        self._below.pause_reading()

    def resume_reading(self) -> None:
        assert self._below is not None
        self._below.resume_reading()

    def is_closing(self) -> bool:
        return self._is_closing or self._below is None or self._below.is_closing()

    def close(self) -> None:
        """Tell the peer that no more will come, and close after all that was written has been sent."""
        if self._is_closing or self._below is None:
            return
        self._is_closing = True
        with suppress(ssl.SSLError):  # it wants the peer's answer, for which nobody waits
            self._tls.unwrap()
        self._send_encrypted()
        self._below.close()

    def abort(self) -> None:
        self._is_closing = True
        if self._below is not None:
            self._below.abort()
