"""The common part of all connections of one server, or of one client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from downrange.protocol.framing import Frame
from downrange.transport.busy_poll import BusyPoll
from downrange.transport.limits import Limits, Usage
from downrange.transport.serving import Serve, close_for_bug, refuse_all

if TYPE_CHECKING:
    from downrange.transport.connection import Connection

ReplyReader = Callable[[list[Frame], int, "Connection"], int]
"""Takes replies to requests of `Connection.ask_encoded`, from a position in the frames on, and returns the position of
the first frame that it leaves to the connection. It removes the requests from `Connection.requests`, tells their
waiters, and calls `Connection.room_made`."""


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
