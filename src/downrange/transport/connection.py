"""One TCP connection: frames in and out.

Both ends are alike: either may ask (`requester.py`) and either may answer. All whole frames of one received chunk are
handled in one go:

    data_received ─▶ frames ─▶ replies: matched to this end's own requests (`Endpoint.read_replies`)
                           └─▶ requests: `Endpoint.serve` (`serving.py`) ─▶ `output.py` ─▶ transport
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from downrange.model.message_id import pack_host
from downrange.protocol.command import Buffer
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame
from downrange.transport.output import Output
from downrange.transport.requester import Requester
from downrange.transport.serving import Endpoint

if TYPE_CHECKING:
    from downrange.transport.socket_transport import SocketTransport
    from downrange.transport.sockets import TlsSocket

log = logging.getLogger(__name__)


class Connection(Requester, asyncio.Protocol):
    """One end of one TCP connection.

    Holds always: requests are served in the order they came; a peer that does not read is not read from, unless this
    end waits for its replies; nothing that a closed connection holds holds the connection, so it is freed without the
    garbage collector. Used on the loop's thread only.
    """

    def __init__(
        self,
        endpoint: Endpoint | None = None,
        *,
        decoder: FrameDecoder | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint = endpoint = endpoint or Endpoint()
        self.deliver = endpoint.deliver
        """Serves frames. `Sockets` may serve them together with those of other connections."""
        self.limits = endpoint.limits
        self.usage = endpoint.usage
        super().__init__(loop, Output(loop, self.limits, self.usage), self.limits.max_requests_per_connection)
        self.peer_host = b""
        """The peer's address and port as a record stores them."""
        self.last_received = self._opened = 0.0
        self.is_full = False
        """Frames must be deferred: the socket takes no more for now, or earlier frames are deferred."""
        self.socket: SocketTransport | TlsSocket | None = None
        """The transport, if `Sockets` reads this connection together with others; over TLS, what stands for it."""
        self._decoder = decoder or FrameDecoder()
        self._on_open = on_open
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        self._frame_since = 0.0
        self._deferred: list[Frame] = []
        self._answering = 0
        self._answered: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = loop.create_future()

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection {self.peer} {state} asked={len(self.requests)} answering={self._answering}>"

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("ssl_object") is not None

    @property
    def is_writable(self) -> bool:
        return self.is_open and not self._output.is_full

    # --- receiving ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        decoder = self._decoder
        frames = decoder.frames(data)
        now = self.last_received = self._time()
        if frames and self.requests:
            frames = self._without_replies(frames)
        if frames:
            if self.is_full:
                self._deferred += frames
            else:
                self._serve(frames)
        if decoder.error is not None:
            self.break_off(decoder.error)
        elif decoder.buffered:
            self._frame_since = self._frame_since or now
        else:
            self._frame_since = 0.0
        self._gather_if_possible()

    def _serve(self, frames: list[Frame]) -> None:
        self.deliver(frames, [self] * len(frames))

    def _without_replies(self, frames: list[Frame]) -> list[Frame]:
        """Hand each reply to the request that waits for it; return the frames that are requests."""
        read = self._endpoint.read_replies
        others: list[Frame] = []
        at = 0
        while at < len(frames):
            if read is not None and (at := read(frames, at, self)) == len(frames):
                break
            try:
                command = decode_frame(frames[at])
            except RemoteProtocolError as error:
                self._decoder.error = RemoteProtocolError(str(error))  # without the frames that hold this connection
                break
            if command.is_response:
                self._replied(command)
            else:
                others.append(frames[at])
            at += 1
        return others

    def _gather_if_possible(self) -> None:
        """Let `Sockets` gather further frames if they begin a new frame and need not wait for deferred ones."""
        if self.socket is not None:
            self.socket.is_gathered = not self._decoder.buffered and not self._deferred and self._decoder.error is None

    # --- answering ------------------------------------------------------------------------------------------------

    def write(self, frames: Buffer) -> None:
        """Send whole frames now, behind the frames that are queued."""
        self._output.write(frames)

    def reply_parts(self, parts: Sequence[Buffer]) -> bool:
        """Queue one frame until `flush`; False when the peer has enough to read: defer the further frames."""
        self._output.add_parts(parts)
        return not self._output.is_full

    def flush(self) -> None:
        """Send all queued frames in one write."""
        self._output.write()

    def begin_answering(self, requests: int) -> None:
        """So many requests will be answered later; `drain` waits for them before it closes the connection."""
        self._answering += requests
        self.usage.requests += requests

    def end_answering(self, requests: int, *replies: Buffer) -> None:
        """So many requests of `begin_answering` are answered by these replies; a closed connection sends nothing."""
        self._answering -= requests
        self.usage.requests -= requests
        if self._answering == 0 and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if replies and self.is_open:
            self._output.send_parts(replies)

    @property
    def is_overloaded(self) -> bool:
        """Whether too many requests, of this peer or of all peers, already wait for their answers."""
        return self._answering >= self._most or self.usage.requests >= self.limits.max_requests

    # --- a peer that does not read --------------------------------------------------------------------------------

    def defer(self, *frames: Frame) -> None:
        """Keep frames until the peer has read enough; they are served before all frames that come later."""
        self._deferred += frames
        self.is_full = True
        if self.socket is not None:
            self.socket.is_gathered = False

    def hold_back(self, frame: Frame, seconds: float | None) -> None:
        """Keep a frame, and all that come later, for so many seconds, or until somebody calls `go_on`.

        Meanwhile the peer is not read from.
        """
        self.defer(frame)
        if self.is_open and not self.requests:
            assert self._transport is not None
            self._transport.pause_reading()
        if seconds is not None:
            self._loop.call_later(seconds, self.go_on)

    def go_on(self) -> None:
        """Serve the frames that were held back."""
        if not self._output.is_full:  # else the socket's own `resume_writing` follows
            self.resume_writing()

    def pause_writing(self) -> None:
        """The socket takes no more for now: stop reading too, so that the peer cannot pile up replies."""
        assert self._transport is not None
        if not self.requests:  # an end that waits for replies must go on reading them
            self._transport.pause_reading()
        self.is_full = True
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()
        self._wake()
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.resume_reading()
        self.is_full = False
        if self._deferred:
            frames, self._deferred = self._deferred, []
            self._serve(frames)
            self._gather_if_possible()

    # --- opening and closing --------------------------------------------------------------------------------------

    def socket_made(self, socket: SocketTransport) -> None:
        """`connection_made` by `Sockets`."""
        self.socket = self._output.socket = socket
        socket.requests = self.requests
        self.connection_made(cast(asyncio.BaseTransport, socket))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._output.open(self._transport)
        self.last_received = self._opened = self._time()
        name = transport.get_extra_info("peername")
        if name:
            self.peer = self._output.peer = self._asked.peer = f"{name[0]}:{name[1]}"
            self.peer_host = pack_host(name[0].partition("%")[0], name[1])
        else:  # the peer has gone already, and its requests would have no address that they came from
            self._transport.abort()
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._output.close()
        self._deferred.clear()
        self._lost(self._why_lost(error))
        if not self._closed.done():
            self._closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)
        self._transport = None

    def _why_lost(self, error: Exception | None) -> str:
        """The reason for which the requests that wait get no reply."""
        if self._output.why_closed:
            return self._output.why_closed
        reason = f": {error}" if error else ""
        # Servers with tls.server.mode=enforcing, those of RocketMQ too, end plain connections without a word.
        may_want_tls = self.requests and not self.is_tls and self.last_received == self._opened
        return f"{reason}; it may take TLS only" if may_want_tls else reason

    def expire(self, now: float) -> bool:
        """Close when nothing came or went for too long, or a frame takes too long to arrive."""
        if now - max(self.last_received, self._output.last_sent) >= self.limits.idle_seconds:
            reason = "idle"
        elif self._frame_since and now - self._frame_since >= self.limits.frame_seconds:
            reason = "unfinished frame"
        else:
            return False
        log.info("connection closed peer=%s reason=%s", self.peer, reason)
        self.abort()
        return True

    async def drain(self, timeout: float) -> None:
        """Take no further requests, wait for the replies under way, send them, then close."""
        if self.is_open and not self.requests:
            assert self._transport is not None
            self._transport.pause_reading()
        if self.is_open and self._answering:
            self._answered = self._loop.create_future()
            await asyncio.wait([self._answered], timeout=timeout)
        self.close()
        await asyncio.wait([self._closed], timeout=timeout)
        self.abort()

    def close(self) -> None:
        """Close after all queued frames have been sent."""
        self._output.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def break_off(self, error: RemoteProtocolError) -> None:
        """Close at once, because the peer broke the protocol. No further frame is served."""
        self.is_full = True
        log.warning("connection closed peer=%s reason=%s", self.peer, error)
        self._output.why_closed = f": {error}"
        self.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)
