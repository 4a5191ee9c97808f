"""Many connections to one broker, read and written together.

With one request under way on each of many connections, reading and writing each of them alone takes the generator
longer than the broker needs for the request, so that the generator would limit the rate.
"""

from __future__ import annotations

import os
import select
import socket

from downrange.compiled import steps
from downrange.load.links import Closing, open_socket
from downrange.protocol.framing import MAX_FRAME
from downrange.transport.errors import ConnectionLost


class Member(steps.Socket):
    """One connection, and the incomplete frame on it."""

    __slots__ = ("connected", "unread", "unsent")

    def __init__(self, connected: socket.socket) -> None:
        self.connected = connected
        self.descriptor = connected.fileno()
        self.is_gathered = True
        self.unread = b""
        self.unsent = b""

    def whole_frames(self, data: bytes) -> tuple[bytes, int]:
        """The complete frames so far, and their number; an incomplete one is kept for the next call."""
        data = self.unread + data
        at = count = 0
        while len(data) - at >= 4 and (end := at + 4 + int.from_bytes(data[at : at + 4], "big")) <= len(data):
            at = end
            count += 1
        self.unread = data[at:]
        self.is_gathered = not self.unread
        return data[:at], count


class Crowd(Closing):
    """A `Wire` of many connections, for a closed loop; `with` closes them. Needs the compiled module.

    Holds always: each connection gets a frame for every reply read from it, and `outstanding` frames at first.
    Replies that are read together, and frames that are written together, have the same time.
    """

    def __init__(self, address: str, count: int, outstanding: int) -> None:
        self._watched: steps.Sockets[Member] = steps.Sockets(MAX_FRAME - 4, MAX_FRAME)
        self._poll = select.poll()
        self._poll.register(self._watched.fileno(), select.POLLIN)
        self._members: list[Member] = []
        try:
            for _ in range(count):
                member = Member(open_socket(address))
                self._members.append(member)
                self._watched.watch(member, select.EPOLLIN)
        except BaseException:
            self.close()
            raise
        self._next = [member for member in self._members for _ in range(outstanding)]
        self.all = [self]

    def wait(self, seconds: float) -> list[Crowd]:
        """Wait for at most `seconds`; a list with this object if there is something to read, else an empty list."""
        return self.all if self._poll.poll(seconds * 1000) else []

    def read(self) -> bytes:
        """Complete replies of all connections."""
        received = self._watched.receive_joined()
        if received is None:
            return b""
        replies, members, others = received
        self._next += members
        for member, what in others:
            match what:
                case None:
                    self._write_rest(member)
                case int():
                    raise ConnectionLost(f"the connection to the broker failed: {os.strerror(what)}")
                case b"":
                    raise ConnectionLost("the broker closed a connection in the middle of the load")
                case _:
                    whole, count = member.whole_frames(what)
                    replies += whole
                    self._next += [member] * count
        return replies

    def write(self, frames: memoryview) -> None:
        """Write frames of one length, each to the next connection in turn."""
        count = len(frames) // (4 + int.from_bytes(frames[:4], "big"))
        members, self._next = self._next[:count], self._next[count:]
        for member, rest in steps.send_frames(members, frames):
            member.unsent += rest
            member.is_full = True
            self._watched.watch(member, select.EPOLLIN | select.EPOLLOUT)

    def _write_rest(self, member: Member) -> None:
        try:
            member.unsent = member.unsent[member.send(member.unsent) :]
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker failed: {error.strerror}") from None
        if not member.unsent:
            member.is_full = False
            self._watched.watch(member, select.EPOLLIN)

    def close(self) -> None:
        self._watched.close()
        for member in self._members:
            member.connected.close()
