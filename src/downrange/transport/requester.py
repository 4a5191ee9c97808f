"""The asking half of a connection: requests out, replies matched to them by opaque."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from math import inf

from downrange.protocol.command import Command
from downrange.protocol.framing import encode_parts
from downrange.transport.errors import ConnectionLost, RequestTimedOut
from downrange.transport.output import Output
from downrange.transport.outstanding import Asked, Outstanding, Waiter


class Requester:
    """Asks the peer.

    Holds always: every outstanding request ends exactly once, with its reply, a time-out or ConnectionLost.
    Used on the loop's thread only.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, output: Output, most: int) -> None:
        """`most`: how many requests of either end may wait for their replies at a time."""
        self.peer = "?"
        self._loop = loop
        self._time = loop.time
        self._output = output
        self._most = most
        self._opaque = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        """Coroutines that wait until the connection takes another request. Each tries again when it is woken."""
        self._wake = partial(_wake, output, self._waiting)  # no method: what this object holds must not hold it
        self._asked = Outstanding(loop, self._wake)

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
        finally:
            del reply  # it holds the error, and the error's traceback holds this frame

    def request_nowait(self, command: Command, timeout: float = inf) -> asyncio.Future[Command]:
        """Send a request; its reply is the future's result. After cancelling the future, call `forget_given_up`."""
        reply: asyncio.Future[Command] = self._loop.create_future()
        opaque = self.next_opaque()
        self._output.send_parts(encode_parts(command, opaque))
        self._asked.add(opaque, reply, command.code, timeout)
        return reply

    def oneway(self, command: Command) -> None:
        """Send a request that wants no answer."""
        self._output.send_parts(encode_parts(command, self.next_opaque()))

    # --- requests that the caller has encoded ------------------------------------------------------------------------

    def next_opaque(self) -> int:
        """The number of the next request, which its reply repeats."""
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def opaque_if_room(self) -> int | None:
        """`next_opaque` if `has_room`, else None."""
        if self._output.is_full or len(self._asked.requests) >= self._most:
            return None
        opaque = self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return opaque

    def ask_encoded(
        self, opaque: int, frame: bytes, waiter: Waiter, code: int, timeout: float, expected: object = None
    ) -> None:
        """Send a request; `waiter` is told its reply, or the error that is the reason for having none.

        The reply is a Command, or the result that the endpoint's reply reader makes of the reply and of `expected`.
        """
        self._output.send(frame)
        asked = self._asked
        deadline = self._time() + timeout  # as `asked.add` does; this runs for every send
        asked.requests[opaque] = (waiter, deadline, code, timeout, expected)
        if deadline < asked.timer_at:
            asked.set_timer(deadline)

    def oneway_encoded(self, frame: bytes) -> None:
        """`oneway` with a frame that was made for `next_opaque`."""
        self._output.send(frame)

    # --- replies --------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[int, Asked]:
        """The requests that wait for their replies, by opaque. A reply reader removes those it has a reply for."""
        return self._asked.requests

    def forget_given_up(self) -> None:
        """Forget the requests whose waiter was cancelled; late replies to them are ignored."""
        self._asked.forget_given_up()

    def _replied(self, reply: Command) -> None:
        asked = self._asked.requests.pop(reply.opaque, None)
        if asked is not None:
            waiter = asked[0]
            if not waiter.done():
                waiter.set_result(reply)
            self._wake()

    def _lost(self, reason: str) -> None:
        """The connection is closed."""
        self._asked.fail_all(lambda: ConnectionLost(f"connection to {self.peer} was lost{reason}"))
        while self._waiting:  # each finds the connection closed
            _tell(self._waiting.popleft(), True)

    # --- room for another request ---------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether a request may be sent now, without waiting for the peer."""
        return not self._output.is_full and len(self._asked.requests) < self._most

    async def wait_writable(self, timeout: float) -> None:
        """Wait while the peer does not read: requests that want no answer would fill the memory."""
        deadline = self._loop.time() + timeout
        while self._output.is_full:
            await self._wait_for_room(deadline, 0)

    async def _wait_for_room(self, deadline: float, code: int) -> None:
        """Wait until the peer reads again or a reply makes room; each of these wakes one coroutine."""
        self._output.raise_if_closed()
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiting.append(waiter)
        timer = self._loop.call_at(deadline, _tell, waiter, False)
        try:
            if not await waiter:
                raise RequestTimedOut(f"{self.peer} takes no more data: request {code} was not sent")
        finally:
            timer.cancel()

    def room_made(self, replies: int) -> None:
        """The reply reader has taken so many replies."""
        while replies and self._waiting:
            replies -= 1
            self._wake()


def _wake(output: Output, waiting: deque[asyncio.Future[bool]]) -> None:
    """Wake the coroutine that has waited the longest, if the peer reads."""
    while not output.is_full and waiting:
        if _tell(waiting.popleft(), True):
            break


def _tell(waiter: asyncio.Future[bool], is_woken: bool) -> bool:
    """Wake a coroutine; False when it was woken before or has given up."""
    if waiter.done():
        return False
    waiter.set_result(is_woken)
    return True
