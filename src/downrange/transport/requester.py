"""The asking half of a connection: requests out, replies matched to them by opaque."""

from __future__ import annotations

import asyncio
from math import inf

from downrange.protocol.command import Command
from downrange.protocol.framing import encode_parts
from downrange.transport.errors import ConnectionLost, RequestTimedOut
from downrange.transport.output import Output
from downrange.transport.outstanding import Asked, Outstanding, Waiter
from downrange.transport.room import RoomWaiters


class Requester:
    """Asks the peer.

    Holds always: every outstanding request ends exactly once, with its reply, a time-out or ConnectionLost.
    Used on the loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, output: Output, most: int) -> None:
        """`most`: how many requests may wait for their replies, of either end."""
        self.peer = "?"
        self._loop = loop
        self._time = loop.time
        self._output = output
        self._most = most
        self._opaque = 0
        self._asked = Outstanding(loop, self._wake)
        self._waiting = RoomWaiters(loop)

    async def request(self, command: Command, timeout: float) -> Command:
        """Send a request and wait for its reply, whatever its code."""
        deadline = self._loop.time() + timeout
        while not self.has_room:
            await self._wait_for_room(deadline, command.code)
        reply = self.request_nowait(command, deadline - self._loop.time())
        try:
            return await reply
        except asyncio.CancelledError:
            self.forget_given_up()
            raise

    def request_nowait(self, command: Command, timeout: float = inf) -> asyncio.Future[Command]:
        """Send a request; its reply is the future's result. Who cancels the future calls `forget_given_up`."""
        reply: asyncio.Future[Command] = self._loop.create_future()
        opaque = self.next_opaque()
        self._output.send_parts(encode_parts(command, opaque))
        self._asked.add(opaque, reply, command.code, timeout)
        return reply

    def oneway(self, command: Command) -> None:
        """Send a request that wants no answer."""
        self._output.send_parts(encode_parts(command, self.next_opaque()))

    # --- with frames that others have made ------------------------------------------------------------------------

    def next_opaque(self) -> int:
        """What the next request is known by."""
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def opaque_if_room(self) -> int | None:
        """The same if `has_room`."""
        if self._output.is_full or len(self._asked.requests) >= self._most:
            return None
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def ask_encoded(
        self, opaque: int, frame: bytes, waiter: Waiter, code: int, timeout: float, expected: object = None
    ) -> None:
        """Send a request; its reply, or why there is none, is told to `waiter`.

        The reply is a Command, or what `express` makes of it and of `expected`.
        """
        self._output.send(frame)
        asked = self._asked
        deadline = self._time() + timeout  # `add`, for every send
        asked.requests[opaque] = (waiter, deadline, code, timeout, expected)
        if deadline < asked.timer_at:
            asked.set_timer(deadline)

    def oneway_encoded(self, frame: bytes) -> None:
        """`oneway` with a frame that was made for `next_opaque`."""
        self._output.send(frame)

    # --- replies --------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[int, Asked]:
        """The requests that wait for their replies, by opaque. An express takes out those it answers."""
        return self._asked.requests

    def forget_given_up(self) -> None:
        """Make room of the requests nobody waits for any more; late replies to them are ignored."""
        self._asked.forget_given_up()

    def _replied(self, reply: Command) -> None:
        asked = self._asked.requests.pop(reply.opaque, None)
        if asked is not None:
            if not asked[0].done():
                asked[0].set_result(reply)
            self._wake()

    def _lost(self, reason: str) -> None:
        """The connection is gone."""
        self._asked.fail_all(lambda: ConnectionLost(f"connection to {self.peer} was lost{reason}"))
        while self._waiting.wake():  # each finds the connection closed
            pass

    # --- room -----------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now, without waiting for the peer."""
        return not self._output.is_full and len(self._asked.requests) < self._most

    async def wait_writable(self, timeout: float) -> None:
        """Wait while the peer does not read: who sends without waiting for answers would fill the memory."""
        deadline = self._loop.time() + timeout
        while self._output.is_full:
            await self._wait_for_room(deadline, 0)

    async def _wait_for_room(self, deadline: float, code: int) -> None:
        """Wait until the peer reads again or an answer makes room; one waiter is woken for each."""
        self._output.raise_if_closed()
        if not await self._waiting.wait(deadline):
            raise RequestTimedOut(f"{self.peer} takes no more data: request {code} was not sent")

    def room_made(self, replies: int) -> None:
        """So many replies were taken by an express."""
        while replies and self._waiting.waiters:
            replies -= 1
            self._wake()

    def _wake(self) -> None:
        if not self._output.is_full:
            self._waiting.wake()
