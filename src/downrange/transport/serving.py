"""How requests are answered: one callback for whole frames, and the pieces that such callbacks are made of.

    Connection, Sockets ─▶ serve(frames, origins) ─▶ send_replies, reply_parts, end_answering

`serve_commands` makes such a callback from a plain function that answers one `Command`. That function returns its
reply, a future for a reply that comes later, or None for no reply. No request has a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, cast

from downrange.compiled import steps
from downrange.model.errors import MQError
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import RESPONSE_FLAG, Buffer, Command
from downrange.protocol.errors import BrokerError, RemoteProtocolError
from downrange.protocol.framing import Frame, decode_frame, encode_parts
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.limits import Limits, Usage

if TYPE_CHECKING:
    from downrange.transport.connection import Connection
    from downrange.transport.socket_transport import SocketTransport
    from downrange.transport.sockets import TlsSocket

log = logging.getLogger(__name__)

Serve = Callable[[list[Frame], list["Connection"]], None]
"""Answers whole frames; frames[n] came over origins[n], and the frames of one connection stand in the order they came.

It must hand all replies of neighbouring frames to the transport (`send_replies`, `Connection.flush`) before it goes on
to frames that it answers in another way, so that replies keep the order of their requests."""
LaterReply = asyncio.Future[Command | None]
CommandHandler = Callable[[Command, "Connection"], Command | LaterReply | None]
"""Answers one command: now, later, or not at all. What it raises becomes a reply, see `error_reply`."""


ReplyReader = Callable[[list[Frame], int, "Connection"], int]
"""Takes replies to requests of `Connection.ask_encoded`, from a position in the frames on, and returns the position of
the first frame that it leaves to the connection. It removes the requests from `Connection.requests`, tells their
waiters, and calls `Connection.room_made`."""


class Refusal(Protocol):
    """Why a request is not carried out, and what happens to its connection."""

    @property
    def error(self) -> BrokerError:
        """The answer."""

    @property
    def wait_seconds(self) -> float:
        """If not 0: there is no answer yet, the request must be offered again after so many seconds."""

    @property
    def ends_connection(self) -> bool: ...


Admit = Callable[[list[Frame], list["Connection"], int, int], tuple[int, Refusal | None]]
"""The position of the first request of `frames[at:stop]` that is refused, and why; `stop` and None for none."""


def serve_commands(handle: CommandHandler, admit: Admit | None = None) -> Serve:
    """A `Serve` that decodes every frame and lets `handle` answer the command, if `admit` does not refuse it."""

    def serve(frames: list[Frame], origins: list[Connection]) -> None:
        last = origins[0]
        for at, (frame, origin) in enumerate(zip(frames, origins, strict=True)):
            if origin is not last:
                last.flush()
                last = origin
            refusal = None
            if admit is not None and not origin.is_full:
                refusal = admit(frames, origins, at, at + 1)[1]
            if refusal is None:
                answer_frame(handle, frame, origin)
            else:
                turn_away(refusal, frame, origin)
        last.flush()

    return serve


def turn_away(refusal: Refusal, frame: Frame, origin: Connection) -> None:
    """Answer a request that is not carried out, at once or after its wait, and close the connection if it must end."""
    if refusal.wait_seconds:
        origin.hold_back(frame, refusal.wait_seconds)
        return
    answer_frame(lambda command, _: error_reply(command, refusal.error), frame, origin)
    origin.flush()
    if refusal.ends_connection:
        origin.break_off(RemoteProtocolError("too many refused requests in a row"))


def answer_frame(handle: CommandHandler, frame: Frame, origin: Connection) -> None:
    """Answer the command in one frame, or defer the frame while its peer has enough to read. The caller flushes.

    A reply that nobody waits for any more is ignored.
    """
    if origin.is_full:
        origin.defer(frame)
        return
    try:
        command = decode_frame(frame)
    except RemoteProtocolError as error:
        origin.break_off(error)
        return
    if not command.flag & RESPONSE_FLAG:
        answer_command(handle, command, origin)


def answer_command(handle: CommandHandler, command: Command, origin: Connection) -> None:
    """Answer one command. A reply that is known at once is queued: the caller flushes."""
    reply: Command | LaterReply | None
    if origin.is_overloaded:
        reply = command.reply(ResponseCode.SYSTEM_BUSY, "[OVERLOAD]system busy, start flow control for a while")
    else:
        try:
            reply = handle(command, origin)
        except RemoteProtocolError as error:
            origin.break_off(error)
            return
        except Exception as error:
            reply = error_reply(command, error)
    if isinstance(reply, asyncio.Future):
        origin.begin_answering(1)
        reply.add_done_callback(partial(_answer_later, command, origin))
    elif reply is not None and not command.is_oneway:
        origin.reply_parts(encode_reply(reply))


def _answer_later(command: Command, origin: Connection, later: LaterReply) -> None:
    error = asyncio.CancelledError() if later.cancelled() else later.exception()
    reply = None
    if origin.is_open and not command.is_oneway:
        reply = later.result() if error is None else error_reply(command, error)
    origin.end_answering(1, *(() if reply is None else encode_reply(reply)))


def send_replies(origins: list[Connection], frames: bytes) -> None:
    """Send one whole frame to each origin; `frames` has them one behind the other, in the order of `origins`.

    Neighbouring frames of one connection leave in one write. Each connection's older output leaves first. All origins
    belong to one server. When `frames` does not fit `origins`, the connections are closed: their peers cannot be
    answered, and must not wait in vain.
    """
    if not origins:
        return
    try:
        if origins[0].socket is None:
            _send_each(origins, frames)
        else:
            sockets = cast("list[SocketTransport | TlsSocket]", [origin.socket for origin in origins])
            for socket, rest in steps.send_frames(sockets, frames):
                socket.protocol.write(rest)
    except ValueError as error:
        close_for_bug(origins, error)


def _send_each(origins: list[Connection], frames: bytes) -> None:
    """`send_replies` over transports of the event loop."""
    first = origins[0]
    if first is origins[-1] and origins.count(first) == len(origins):
        first.write(frames)
        return
    writes: list[tuple[Connection, int]] = []
    at = 0
    for origin in origins:
        at += 4 + int.from_bytes(frames[at : at + 4], "big")
        if writes and writes[-1][0] is origin:
            writes.pop()
        writes.append((origin, at))
    if at != len(frames):
        raise ValueError("a connection and a frame for each are expected")
    start = 0
    for origin, end in writes:
        origin.write(frames[start:end])
        start = end


def room_until(origins: list[Connection], at: int, stop: int) -> int:
    """The position of the first connection that is full, from `at` on; `stop` when none is."""
    return next((position for position in range(at, stop) if origins[position].is_full), stop)


def close_for_bug(origins: list[Connection], error: Exception) -> None:
    """Close connections whose requests cannot be answered; their peers find out and may ask again."""
    hit = set(origins)
    log.error("%d connections closed reason=a bug, their requests cannot be answered", len(hit), exc_info=error)
    for origin in hit:
        origin.abort()


def refuse(command: Command, connection: Connection) -> Command:
    """The command handler of an endpoint that answers no requests."""
    return command.reply(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {command.code} not supported")


refuse_all: Final = serve_commands(refuse)


def error_reply(command: Command, error: BaseException) -> Command:
    """The one place where errors become reply codes."""
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


def encode_reply(reply: Command) -> list[Buffer]:
    """The frame of a reply. A reply that is too large becomes an error reply, or the peer would wait in vain."""
    try:
        return encode_parts(reply)
    except MQError as error:
        log.error("reply cannot be sent code=%d reason=%s", reply.code, error)
        return encode_parts(Command(ResponseCode.SYSTEM_ERROR, reply.opaque, 1, remark=str(error)))


class Endpoint:
    """What its connections share: the callback that answers requests, the reader of replies, the limits.

    `serve` may be replaced at any time; the frames that come next go to the new one.
    """

    def __init__(
        self,
        serve: Serve = refuse_all,
        *,
        read_replies: ReplyReader | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.serve = serve
        self.read_replies = read_replies
        self.limits = limits or Limits()
        self.usage = Usage()
        self.busy_poll: BusyPoll | None = None

    def deliver(self, frames: list[Frame], origins: list[Connection]) -> None:
        """Serve frames. A bug in `serve` is logged and closes the connections of these frames, but no others."""
        usage, poll = self.usage, self.busy_poll
        before = usage.requests
        try:
            self.serve(frames, origins)
        except Exception as error:
            close_for_bug(origins, error)
            return
        if poll is not None and usage.requests <= before:  # answered now, not later
            poll.answered(origins[-1], len(frames))
