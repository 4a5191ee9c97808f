"""One TCP connection: frames in and out.

Both ends are alike: either may ask (`requester.py`), either may answer. All complete frames of one received chunk are
handled in one go, and their replies leave in one write (`output.py`):

    data_received ─▶ frames_received ─▶ express: all it knows, at once ─▶ reply_encoded, reply_parts
                                    └─▶ a Command each ─▶ handler ─▶ reply, now or later
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from downrange.model.message_id import pack_host
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Buffer, Command
from downrange.protocol.errors import RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.handler import Express, Handler, LaterReply, encode_reply, error_reply, refuse
from downrange.transport.limits import Limits, Usage
from downrange.transport.output import Output
from downrange.transport.requester import Requester

log = logging.getLogger(__name__)


class Connection(Requester, asyncio.Protocol):
    """One end of one TCP connection.

    Holds always: requests are answered in the order they came, but for those that are answered later; a peer that does
    not read is not read from. Used on the loop's thread only.
    """

    def __init__(
        self,
        handler: Handler = refuse,
        *,
        express: Express | None = None,
        limits: Limits | None = None,
        usage: Usage | None = None,
        decoder: FrameDecoder | None = None,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        busy_poll: BusyPoll | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._limits = limits or Limits()
        self._usage = usage or Usage()
        super().__init__(loop, Output(loop, self._limits, self._usage), self._limits.max_requests_per_connection)
        self.peer_host = b""
        """The peer's address and port as a record stores them."""
        self.last_received = 0.0
        self.express = express
        self._handler = handler
        self._decoder = decoder or FrameDecoder()
        self._on_open = on_open
        self._on_close = on_close
        self._busy_poll = busy_poll
        self._transport: asyncio.Transport | None = None
        self._frame_since = 0.0
        self._unanswered: deque[Command] = deque()
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
    def is_writable(self) -> bool:
        return self.is_open and not self._output.is_full

    # --- what comes -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.frames_received(self._decoder.frames(data))

    @property
    def is_between_frames(self) -> bool:
        """Whether everything received was handled, so that the next byte is a frame's first."""
        return not self._decoder.buffered and self._decoder.error is None

    def frames_received(self, frames: list[Frame]) -> None:
        """Whole frames came, all that one chunk brought."""
        now = self.last_received = self._time()
        decoder, output, express = self._decoder, self._output, self.express
        output.is_scheduled = True  # what is queued from here on leaves below, in one write
        count = len(frames)
        at = 0
        while at < count:
            if (
                express is not None
                and not output.is_full
                and not self._unanswered
                and self._answering < self._most
                and self._usage.requests < self._limits.max_requests
            ):
                first = at
                at = express(frames, at, self)
                if at == count:
                    break
                if at > first:  # where one kind of short cut ends another may begin
                    continue
            try:
                self._take(decode_frame(frames[at]))
            except RemoteProtocolError as error:
                decoder.error = error
                break
            at += 1
        if decoder.error is not None:
            log.warning("connection closed peer=%s reason=%s", self.peer, decoder.error)
            output.why_closed = f": {decoder.error}"
            self.abort()
            return
        if decoder.buffered:
            self._frame_since = self._frame_since or now
        else:
            self._frame_since = 0.0
        if output.write() and self._busy_poll is not None:
            self._busy_poll.answered(self, count)

    def _take(self, command: Command) -> None:
        if command.flag & 1:
            self._replied(command)
        elif self._output.is_full or self._unanswered:
            self._unanswered.append(command)
        else:
            self._answer(command)
            self._output.flush_much()

    def _answer_rest(self) -> None:
        """Go on with what came in one chunk with a request whose reply filled the socket."""
        while self._unanswered and not self._output.is_full and self.is_open:
            self._answer(self._unanswered.popleft())
            self._output.flush_much()
        self._output.flush()

    def _answer(self, command: Command) -> None:
        """What is answered at once is queued: whoever calls this flushes."""
        if self.is_overloaded:
            busy = "[OVERLOAD]system busy, start flow control for a while"
            reply: Command | LaterReply | None = command.reply(ResponseCode.SYSTEM_BUSY, busy)
        else:
            try:
                reply = self._handler(command, self)
            except RemoteProtocolError as error:
                log.warning("connection closed peer=%s reason=%s", self.peer, error)
                self.abort()
                return
            except Exception as error:
                reply = error_reply(command, error)
        if isinstance(reply, asyncio.Future):
            self.begin_answering(1)
            reply.add_done_callback(partial(self._answer_later, command))
        elif reply is not None and not command.is_oneway:
            self._output.add_parts(encode_reply(reply))

    def _answer_later(self, command: Command, later: LaterReply) -> None:
        error = asyncio.CancelledError() if later.cancelled() else later.exception()
        reply = None
        if self.is_open and not command.is_oneway:
            reply = later.result() if error is None else error_reply(command, error)
        self.end_answering(1, *(() if reply is None else encode_reply(reply)))

    # --- answers of an express ------------------------------------------------------------------------------------

    def reply_encoded(self, replies: bytes) -> None:
        """Send whole frames that answer requests of the chunk at hand: they leave at its end."""
        self._output.add(replies)

    def reply_parts(self, parts: list[Buffer]) -> bool:
        """Send one frame that answers a request of the chunk at hand; False: leave the further requests of it to us."""
        self._output.add_parts(parts)
        self._output.flush_much()
        return not self._output.is_full

    # TEMPORARY: the new transport has its own `is_full`, `defer` and `flush`.

    @property
    def is_full(self) -> bool:  # TEMPORARY
        return self._output.is_full

    def defer(self, frame: Frame) -> None:  # TEMPORARY
        self._unanswered.append(decode_frame(frame))

    def flush(self) -> None:  # TEMPORARY
        """Whoever handed the frames over flushes."""

    def begin_answering(self, requests: int) -> None:
        """So many requests will be answered later: before the connection is closed in good order."""
        self._answering += requests
        self._usage.requests += requests

    def end_answering(self, requests: int, *replies: Buffer) -> None:
        """These are the answers to so many of them, if they want any; nothing is sent when nobody listens any more."""
        self._answering -= requests
        self._usage.requests -= requests
        if self._answering == 0 and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if replies and self.is_open:
            self._output.send_parts(replies)

    @property
    def is_overloaded(self) -> bool:
        """Do too many requests wait for their answers already, of this peer or of all?"""
        return self._answering >= self._most or self._usage.requests >= self._limits.max_requests

    # --- a peer that does not read --------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """The socket takes no more for now: stop reading too, so that the peer cannot pile up replies."""
        assert self._transport is not None
        if not self.requests:  # an endpoint that waits for answers must go on reading them
            self._transport.pause_reading()
        self._output.pause()

    def resume_writing(self) -> None:
        self._output.resume()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._wake()
        if self._unanswered:
            self._answer_rest()

    # --- life -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._output.open(self._transport)
        self.last_received = self._time()
        name = transport.get_extra_info("peername")
        if name:
            self.peer = self._output.peer = self._asked.peer = f"{name[0]}:{name[1]}"
            self.peer_host = pack_host(name[0].partition("%")[0], name[1])
        else:  # it has gone already: what it sent before has nobody to come from
            self._transport.abort()
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._output.close()
        self._unanswered.clear()
        self._lost(f": {error}" if error else self._output.why_closed)
        if not self._closed.done():
            self._closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)

    def expire(self, now: float) -> bool:
        """Close when nothing came or went for too long, or a frame takes too long to arrive."""
        if now - max(self.last_received, self._output.last_sent) >= self._limits.idle_seconds:
            reason = "idle"
        elif self._frame_since and now - self._frame_since >= self._limits.frame_seconds:
            reason = "unfinished frame"
        else:
            return False
        log.info("connection closed peer=%s reason=%s", self.peer, reason)
        self.abort()
        return True

    async def drain(self, timeout: float) -> None:
        """Take no further requests, answer those at hand, send what is queued, then close."""
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
        """Close after what is queued has been sent."""
        self._output.flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)
