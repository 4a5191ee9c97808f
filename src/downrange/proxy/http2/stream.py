"""One call: the messages of its request, and its answer."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Final

from downrange.proxy.http2.limits import Http2Limits

if TYPE_CHECKING:
    from downrange.proxy.http2.connection import Http2Connection

_PREFIX: Final = struct.Struct(">BI")  # is compressed, length

RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12


class Stream:
    """A call of a client. Messages come in by `receive`; answers go out by `answer`, or `send_message` and `finish`.

    `task` is cancelled when the client gives the call up.
    """

    __slots__ = (
        "_messages",
        "_part",
        "_room",
        "_taken",
        "_waiter",
        "connection",
        "final",
        "has_headers",
        "headers",
        "is_closed",
        "is_half_closed",
        "number",
        "task",
        "unsent",
        "window",
    )

    def __init__(self, connection: Http2Connection, number: int, headers: dict[bytes, bytes], window: int) -> None:
        self.connection = connection
        self.number = number
        self.headers = headers
        self.window = window
        self.unsent = bytearray()
        self.has_headers = False
        self.is_half_closed = False
        """Whether the client has sent everything."""
        self.is_closed = False
        self.final: tuple[int, str] | None = None
        self.task: asyncio.Task[None] | None = None
        self._messages: list[bytes] = []
        self._part = bytearray()
        self._taken = 0
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<Stream {self.number} of {self.connection.peer} unsent={len(self.unsent)}>"

    # --- the request ----------------------------------------------------------------------------------------------

    def data(self, payload: bytes, size: int, limits: Http2Limits) -> None:
        """Take data of the request; `size` is what it took of the window."""
        self._taken += size
        if self._taken * 2 > limits.stream_window and not self.is_closed:
            self.connection.room_given(self.number, self._taken)
            self._taken = 0
        part = self._part
        part += payload
        self.connection.held += len(payload)
        while len(part) >= _PREFIX.size:
            is_compressed, length = _PREFIX.unpack_from(part)
            if is_compressed:
                self.finish(UNIMPLEMENTED, "compressed messages are not supported")
                return
            if length > limits.max_message_bytes:
                self.finish(RESOURCE_EXHAUSTED, f"a message of {length} bytes; at most {limits.max_message_bytes}")
                return
            end = _PREFIX.size + length
            if len(part) < end:
                return
            self._messages.append(bytes(part[_PREFIX.size : end]))
            del part[:end]
            self._wake()

    def half_closed(self) -> None:
        """The client has sent everything."""
        self.is_half_closed = True
        self._wake()

    def cancelled(self) -> None:
        """The client gave the call up, or is gone."""
        self.closed()
        if self.task is not None:
            self.task.cancel()

    def closed(self) -> None:
        """The call is over: nothing is held for it any more."""
        if self.is_closed:
            return
        self.is_closed = True
        held = len(self._part) + len(self.unsent) + sum(map(len, self._messages)) + 5 * len(self._messages)
        self.connection.held -= held
        self._part.clear()
        self._messages.clear()
        self.unsent.clear()
        self._wake()
        self.room()

    async def receive(self) -> bytes | None:
        """The next message of the request; None when the client has sent everything."""
        while not self._messages:
            if self.is_half_closed or self.is_closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.pop(0)
        self.connection.held -= len(message) + _PREFIX.size
        return message

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the answer -----------------------------------------------------------------------------------------------

    def answer(self, message: bytes) -> None:
        """Send the only message of the answer, and end the call well."""
        self.connection.answer(self, _PREFIX.pack(0, len(message)) + message)

    def send(self, data: bytes) -> None:
        """Send data of the answer with its prefix."""
        self.connection.send(self, data)

    def send_message(self, message: bytes) -> None:
        self.connection.send(self, _PREFIX.pack(0, len(message)) + message)

    def finish(self, status: int = 0, message: str = "") -> None:
        self.connection.finish(self, status, message)

    async def drained(self) -> None:
        """Wait until the client took what was sent."""
        while self.unsent and not self.is_closed:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def room(self) -> None:
        """All that was sent is on its way."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
