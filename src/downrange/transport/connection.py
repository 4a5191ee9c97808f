"""One TCP connection: frames in and out, requests matched to replies by opaque.

Both ends are alike: either may ask, either may answer. A request handler is a plain function that returns its reply
now, or a future for a reply later, or None for no reply. All complete frames of one received chunk are handled in one
go and their replies leave in one write. There is no task per request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import cast

from downrange.model.errors import MQError
from downrange.model.message_id import pack_host
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Buffer, Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError
from downrange.protocol.framing import Frame, FrameDecoder, decode_frame, encode_parts
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.errors import ConnectionLost, TransportClosed
from downrange.transport.limits import Limits, Usage
from downrange.transport.outstanding import Asked, Outstanding, Waiter
from downrange.transport.room import RoomWaiters

log = logging.getLogger(__name__)

LaterReply = asyncio.Future[Command | None]
Handler = Callable[[Command, "Connection"], Command | LaterReply | None]
Express = Callable[[list[Frame], int, "Connection"], int]
"""Answers the frames from a position on that need no `Command` to be made of them, all in one go, and returns the
position of the first that it leaves to the handler. Its replies go through `reply_encoded` and `reply_later`. At the
end that asks, it takes replies to requests of `ask_encoded`, and says `room_made` for them."""

# Buffers up to this size are joined before writing: one copy is cheaper than another entry of a gathering write.
_JOIN_BELOW = 32 * 1024
# Requests of one chunk are answered in one write, up to this much: small requests may have big replies.
_FLUSH_ABOVE = 256 * 1024


def refuse(command: Command, connection: Connection) -> Command:
    """The handler of an endpoint that serves nothing."""
    return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported")


def error_reply(command: Command, error: BaseException) -> Command:
    """The door where errors become reply codes."""
    match error:
        case BrokerError():
            return command.reply(error.code, error.remark)
        case MQError():
            return command.reply(ResponseCode.SYSTEM_ERROR, str(error))
        case asyncio.CancelledError():
            return command.reply(ResponseCode.SYSTEM_ERROR, "the request was given up: this server is stopping")
        case _:
            log.error("request failed code=%d", command.code, exc_info=error)
            return command.reply(ResponseCode.SYSTEM_ERROR, f"{type(error).__name__}: {error}")


class Connection(asyncio.Protocol):
    """One end of one TCP connection.

    Holds always: every outstanding request of ours ends exactly once, with its reply, a time-out or ConnectionLost; a
    peer that does not read is not read from, and is cut off when it leaves too much unsent.
    Used on the loop's thread only.
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
        self.peer = "?"
        self.peer_host = b""
        """The peer's address and port as a record stores them."""
        self.last_active = 0.0
        self._handler = handler
        self.express = express
        self._limits = limits or Limits()
        self._usage = usage or Usage()
        self._decoder = decoder or FrameDecoder()
        self._on_open = on_open
        self._on_close = on_close
        self._busy_poll = busy_poll
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._transport: asyncio.Transport | None = None
        self._opaque = 0
        self._asked = Outstanding(self._loop, self._wake_writer)
        self._answering = 0
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._unanswered: deque[Command] = deque()
        self._flush_scheduled = False
        self._unsent = 0
        self._paused = False
        self._frame_since = 0.0
        self._waiting = RoomWaiters(self._loop)
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._answered: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<Connection {self.peer} {state} asked={len(self._asked.requests)} answering={self._answering}>"

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        return self.is_open and not self._paused

    # --- asking -------------------------------------------------------------------------------------------------

    async def request(self, command: Command, timeout: float) -> Command:
        """Send a request and wait for its reply, whatever its code."""
        deadline = self._loop.time() + timeout
        while not self.has_room:
            await self._wait_writable(deadline, command.code)
        reply = self.request_nowait(command, deadline - self._loop.time())
        try:
            return await reply
        except asyncio.CancelledError:
            self.forget_given_up()
            raise

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now, without waiting for the peer."""
        return not self._paused and len(self._asked.requests) < self._limits.max_requests_per_connection

    def request_nowait(self, command: Command, timeout: float = inf) -> asyncio.Future[Command]:
        """Send a request; its reply is the future's result. Who cancels the future calls `forget_given_up`."""
        reply: asyncio.Future[Command] = self._loop.create_future()
        self.ask(command, reply, timeout)
        return reply

    def ask(self, command: Command, waiter: Waiter, timeout: float) -> None:
        """Send a request; its reply, or why there is none, is told to `waiter`."""
        opaque = self.next_opaque()
        self._send(encode_parts(command, opaque))
        self._asked.add(opaque, waiter, command.code, timeout)

    def next_opaque(self) -> int:
        """What the next request is known by."""
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def opaque_if_room(self) -> int | None:
        """The same if `has_room`."""
        if self._paused or len(self._asked.requests) >= self._limits.max_requests_per_connection:
            return None
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def ask_encoded(
        self, opaque: int, frame: bytes, waiter: Waiter, code: int, timeout: float, expected: object = None
    ) -> None:
        """`ask` with a frame that was made for `opaque`. The reply is a Command, or what `express` makes of it and of
        `expected`."""
        if self._transport is None or self._transport.is_closing():
            self._raise_if_closed()
        self._out.append(frame)
        self._out_bytes += len(frame)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        asked = self._asked
        deadline = self._time() + timeout  # `add`, for every send
        asked.requests[opaque] = (waiter, deadline, code, timeout, expected)
        if deadline < asked.timer_at:
            asked.set_timer(deadline)

    @property
    def requests(self) -> dict[int, Asked]:
        """The requests that wait for their replies, by opaque. An express takes out those it answers."""
        return self._asked.requests

    def room_made(self, replies: int) -> None:
        """So many replies were taken by an express."""
        while replies and self._waiting.waiters:
            replies -= 1
            self._wake_writer()

    def forget_given_up(self) -> None:
        """Make room of the requests nobody waits for any more; late replies to them are ignored."""
        self._asked.forget_given_up()

    def oneway_encoded(self, frame: bytes) -> None:
        """`oneway` with a frame that was made for `next_opaque`."""
        self._send([frame])

    def oneway(self, command: Command) -> None:
        """Send a request that wants no answer."""
        self._send(encode_parts(command, self.next_opaque()))

    async def wait_writable(self, timeout: float) -> None:
        """Wait while the peer does not read: who sends without waiting for answers would fill the memory."""
        deadline = self._loop.time() + timeout
        while self._paused:
            await self._wait_writable(deadline, 0)

    async def _wait_writable(self, deadline: float, code: int) -> None:
        """Wait until the peer reads again or an answer makes room; one waiter is woken for each."""
        self._raise_if_closed()
        await self._waiting.wait(deadline, code)

    def _wake_writer(self) -> None:
        if not self._paused:
            self._waiting.wake()

    # --- answering ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.frames_received(self._decoder.frames(data))

    @property
    def is_between_frames(self) -> bool:
        """Whether everything received was handled, so that the next byte is a frame's first."""
        return not self._decoder.buffered and self._decoder.error is None

    def frames_received(self, frames: list[Frame]) -> None:
        """Whole frames came, all that one chunk brought."""
        now = self.last_active = self._time()
        decoder = self._decoder
        express = self.express
        limits = self._limits
        count = len(frames)
        at = 0
        was_scheduled = self._flush_scheduled
        self._flush_scheduled = True  # what is queued from here on leaves below, in one write
        while at < count:
            if (
                express is not None
                and not self._paused
                and not self._unanswered
                and self._answering < limits.max_requests_per_connection
                and self._usage.requests < limits.max_requests
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
            self.abort()
            return
        if decoder.buffered:
            self._frame_since = self._frame_since or now
        else:
            self._frame_since = 0.0
        if self._out:
            self._write()
            if self._busy_poll is not None:
                self._busy_poll.answered(self, count)
        else:
            self._flush_scheduled = was_scheduled

    def _take(self, command: Command) -> None:
        if command.flag & 1:
            asked = self._asked.requests.pop(command.opaque, None)
            if asked is not None:
                if not asked[0].done():
                    asked[0].set_result(command)
                if self._waiting.waiters:
                    self._wake_writer()
        elif self._paused or self._unanswered:
            self._unanswered.append(command)
        else:
            self._answer(command)
            if self._out_bytes > _FLUSH_ABOVE:
                self._flush()

    def _answer_rest(self) -> None:
        """Go on with what came in one chunk with a request whose reply filled the socket."""
        while self._unanswered and not self._paused and self.is_open:
            self._answer(self._unanswered.popleft())
            if self._out_bytes > _FLUSH_ABOVE:
                self._flush()
        if self._out:
            self._flush()

    def _answer(self, command: Command) -> None:
        if self._is_overloaded:
            if not command.is_oneway:
                self._reply(
                    command.reply(ResponseCode.SYSTEM_BUSY, "[OVERLOAD]system busy, start flow control for a while")
                )
            return
        try:
            reply = self._handler(command, self)
        except RemoteProtocolError as error:
            log.warning("connection closed peer=%s reason=%s", self.peer, error)
            self.abort()
            return
        except Exception as error:
            reply = error_reply(command, error)
        if reply is None:
            return
        if isinstance(reply, Command):
            if not command.is_oneway:
                self._reply(reply)
            return
        self.begin_answering(1)
        reply.add_done_callback(partial(self._answer_later, command))

    def reply_encoded(self, replies: bytes) -> None:
        """Send whole frames that answer requests of the chunk at hand: they leave at its end."""
        self._out.append(replies)
        self._out_bytes += len(replies)

    def reply_parts(self, parts: list[Buffer]) -> bool:
        """Send one frame that answers a request of the chunk at hand; False: leave the further requests of it to us."""
        self._out += parts
        for part in parts:
            self._out_bytes += len(part)
        if self._out_bytes > _FLUSH_ABOVE:
            self._flush()
            self._flush_scheduled = True  # as it is all the time while a chunk is handled
        return not self._paused

    def reply_later(self, requests: int) -> Callable[[bytes], None]:
        """The same for that many requests, once their answer is known: call what is returned with it, exactly once."""
        self.begin_answering(requests)
        return partial(self._reply_encoded_later, requests)

    def _reply_encoded_later(self, requests: int, replies: bytes) -> None:
        self.end_answering(requests)
        if replies and self.is_open:
            self._send([replies])

    def hold(self) -> bool:
        """The answer to one request of the chunk at hand comes by `end_hold`; False: too many wait already."""
        if self._is_overloaded:
            return False
        self.begin_answering(1)
        return True

    def end_hold(self, reply: Command | list[Buffer] | None) -> None:
        """Answer a request that was held, with a reply or its frame; None: there is nobody to answer."""
        self.end_answering(1)
        if reply is None or not self.is_open:
            return
        if isinstance(reply, Command):
            self._reply(reply)
        else:
            self._send(reply)

    @property
    def _is_overloaded(self) -> bool:
        """Do too many requests wait for their answers already, of this peer or of all?"""
        limits = self._limits
        return self._answering >= limits.max_requests_per_connection or self._usage.requests >= limits.max_requests

    def begin_answering(self, requests: int) -> None:
        """So many requests will be answered later: before the connection is closed in good order."""
        self._answering += requests
        self._usage.requests += requests

    def end_answering(self, requests: int) -> None:
        self._answering -= requests
        self._usage.requests -= requests
        if self._answering == 0 and self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _answer_later(self, command: Command, later: LaterReply) -> None:
        self.end_answering(1)
        if not self.is_open:
            if not later.cancelled():
                later.exception()  # nobody is left to tell; mark it as looked at
        elif not command.is_oneway:
            error = asyncio.CancelledError() if later.cancelled() else later.exception()
            reply = error_reply(command, error) if error is not None else later.result()
            if reply is not None:
                self._reply(reply)

    def _reply(self, reply: Command) -> None:
        try:
            parts = encode_parts(reply)
        except MQError as error:  # a reply too large for a frame must not leave the peer waiting
            log.error("reply cannot be sent peer=%s reason=%s", self.peer, error)
            parts = encode_parts(Command(ResponseCode.SYSTEM_ERROR, reply.opaque, 1, remark=str(error)))
        if self.is_open:
            self._send(parts)

    # --- writing ------------------------------------------------------------------------------------------------

    def _send(self, parts: list[Buffer]) -> None:
        """Queue a frame; everything queued in one turn of the loop leaves in one write."""
        if self._transport is None or self._transport.is_closing():
            self._raise_if_closed()
        self._out += parts
        for part in parts:
            self._out_bytes += len(part)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._write()
        if not self._paused:
            self.last_active = self._time()

    def _write(self) -> None:
        """Give everything queued to the socket, in one go."""
        self._flush_scheduled = False
        out, size = self._out, self._out_bytes
        self._out, self._out_bytes = [], 0
        if not out or self._transport is None or self._transport.is_closing():
            return
        if len(out) == 1:
            self._transport.write(out[0])
        elif size <= _JOIN_BELOW:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)
        if self._paused:
            self._check_unsent()

    def pause_writing(self) -> None:
        """The socket takes no more for now: stop reading too, so that the peer cannot pile up replies."""
        self._paused = True
        assert self._transport is not None
        if not self._asked.requests:  # an endpoint that waits for answers must go on reading them
            self._transport.pause_reading()
        self._check_unsent()

    def resume_writing(self) -> None:
        self._paused = False
        self._count_unsent(0)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self._wake_writer()
        if self._unanswered:
            self._answer_rest()

    def _check_unsent(self) -> None:
        assert self._transport is not None
        self._count_unsent(self._transport.get_write_buffer_size())
        limits = self._limits
        if self._unsent > limits.max_unsent_bytes_per_connection or self._usage.unsent_bytes > limits.max_unsent_bytes:
            log.warning("connection closed peer=%s reason=it does not read, unsent_bytes=%d", self.peer, self._unsent)
            self.abort()

    def _count_unsent(self, unsent: int) -> None:
        self._usage.unsent_bytes += unsent - self._unsent
        self._unsent = unsent

    # --- life ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.last_active = self._loop.time()
        name = transport.get_extra_info("peername")
        if name:
            self.peer = self._asked.peer = self._waiting.peer = f"{name[0]}:{name[1]}"
            self.peer_host = pack_host(name[0].partition("%")[0], name[1])
        else:  # it has gone already: what it sent before has nobody to come from
            self._transport.abort()
        if self._on_open is not None:
            self._on_open(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._count_unsent(0)
        self._out.clear()
        self._unanswered.clear()
        reason = f": {error}" if error else ""
        self._asked.fail_all(lambda: ConnectionLost(f"connection to {self.peer} was lost{reason}"))
        while self._waiting.wake():  # each finds the connection closed
            pass
        if not self._closed.done():
            self._closed.set_result(None)
        if self._on_close is not None:
            self._on_close(self)

    def expire(self, now: float) -> bool:
        """Close when nothing came or went for too long, or a frame takes too long to arrive."""
        if now - self.last_active >= self._limits.idle_seconds:
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
        if self.is_open and not self._asked.requests:
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
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def _raise_if_closed(self) -> None:
        if not self.is_open:
            raise TransportClosed(f"connection to {self.peer} is closed")
