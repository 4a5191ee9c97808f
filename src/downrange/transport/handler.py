"""What answers requests: the shapes of handlers, and the door where their errors become reply codes.

A handler is a plain function that returns its reply now, or a future for a reply later, or None for no reply. There is
no task per request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from downrange.model.errors import MQError
from downrange.protocol.codes import ResponseCode
from downrange.protocol.command import Buffer, Command
from downrange.protocol.errors import BrokerError
from downrange.protocol.framing import Frame, encode_parts

if TYPE_CHECKING:
    from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

LaterReply = asyncio.Future[Command | None]
Handler = Callable[[Command, "Connection"], Command | LaterReply | None]
Express = Callable[[list[Frame], int, "Connection"], int]
"""Answers the frames from a position on that need no `Command` to be made of them, all in one go, and returns the
position of the first that it leaves to the handler. It replies by `reply_encoded`, `reply_parts` or `end_answering`. At
the end that asks, it takes replies to requests of `ask_encoded`, and says `room_made` for them."""
Replies = bytes | asyncio.Future[bytes] | Exception
"""One frame for each request, now or later; or why there are none, though the requests were carried out."""
Together = Callable[[list[Frame], int, list[bytes], float], tuple[int, Replies, list[int]] | None]
"""Answers frames that came over several connections, from a position on, given the host each came from and the time.
Returns how many it took, the replies, and which of them, counted from that position, want none. None: the first is
nothing for it. It raises only if nothing was carried out: what it took is never offered to anybody again."""


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


def encode_reply(reply: Command) -> list[Buffer]:
    """Its frame. One that is too large becomes an error, or the peer would wait in vain."""
    try:
        return encode_parts(reply)
    except MQError as error:
        log.error("reply cannot be sent code=%d reason=%s", reply.code, error)
        return encode_parts(Command(ResponseCode.SYSTEM_ERROR, reply.opaque, 1, remark=str(error)))


def send_replies(origins: list[Connection], frames: bytes) -> None:  # TEMPORARY: until the transport has it
    at = 0
    for origin in origins:
        end = at + 4 + int.from_bytes(frames[at : at + 4], "big")
        origin._output.send_parts([frames[at:end]])
        at = end
