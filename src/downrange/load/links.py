"""Plain sockets to one broker, and waiting for them.

Not an event loop, because it counts time in milliseconds, and messages that are due must not be sent late.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, Self

from downrange.transport.errors import ConnectFailed, ConnectionLost, RequestTimedOut
from downrange.transport.pool import split_address
from downrange.transport.tls import ClientTls, client_failure

_READ_AT_ONCE: Final = 1 << 18
_LONG_SECONDS: Final = 0.1
_WAKING_SECONDS: Final = 0.0002
"""A thread that sleeps wakes up late, by less than this on a quiet machine: it stays awake for the last moments."""
_CONNECT_SECONDS: Final = 3.0
PATIENCE_SECONDS: Final = 10.0
"""A broker that answers nothing for this long counts as dead."""
_LOOKS: Final = 10
"""How often a thread that sleeps looks at the clock before it gives up."""


class Wire(Protocol):
    """A connection as a sender uses it."""

    def write(self, data: memoryview, /) -> None: ...

    def read(self) -> bytes: ...


class Closing(ABC):
    """An object that `with` closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Link:
    """One connection. Bytes that the kernel does not take at once wait; the caller must not change them."""

    def __init__(self, connected: socket.socket, epoll: select.epoll, space: memoryview) -> None:
        self._socket = connected
        self._space = space
        self._epoll = epoll
        self._waiting: deque[memoryview] = deque()
        self.descriptor = connected.fileno()

    def write(self, data: memoryview | bytes) -> None:
        if self._waiting:
            self._waiting.append(memoryview(data))
            return
        sent = self._send(data)
        if sent < len(data):
            self._waiting.append(memoryview(data)[sent:])
            self._epoll.modify(self.descriptor, select.EPOLLIN | select.EPOLLOUT)

    def write_waiting(self) -> None:
        """Write waiting bytes, when the kernel can take more."""
        while self._waiting:
            view = self._waiting[0]
            sent = self._send(view)
            if sent < len(view):
                self._waiting[0] = view[sent:]
                return
            self._waiting.popleft()
        self._epoll.modify(self.descriptor, select.EPOLLIN)

    def read(self) -> bytes:
        try:
            count = self._socket.recv_into(self._space)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b""
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker failed: {error.strerror}") from None
        if not count:
            raise ConnectionLost("the broker closed a connection in the middle of the load")
        return bytes(self._space[:count])

    def close(self) -> None:
        self._socket.close()

    def _send(self, view: memoryview | bytes) -> int:
        try:
            return self._socket.send(view)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker failed: {error.strerror}") from None


class WaitingLink(Closing):
    """One connection whose thread waits in `read`: it sleeps, or if it `polls`, it asks all the time.

    Between a request and its reply there are only two system calls.
    """

    def __init__(self, address: str, tls: ClientTls | None = None, *, polls: bool = False) -> None:
        self._address = address
        self._polls = polls
        self._space = memoryview(bytearray(_READ_AT_ONCE))
        self._socket = open_socket(address, tls)
        if tls is not None:  # OpenSSL does not know the kernel's limits
            self._socket.settimeout(PATIENCE_SECONDS)
            return
        # Not `settimeout`, which makes a further system call before each read.
        self._socket.setblocking(True)
        look = struct.pack("ll", *divmod(int(PATIENCE_SECONDS / _LOOKS * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, look)

    def close(self) -> None:
        self._socket.close()

    def write(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker failed: {error.strerror}") from None

    def read(self) -> bytes:
        try:
            count = self._receive()
        except (BlockingIOError, TimeoutError):
            raise RequestTimedOut(f"{self._address} has answered nothing for {PATIENCE_SECONDS:g} s") from None
        except OSError as error:
            raise ConnectionLost(f"the connection to the broker failed: {error.strerror}") from None
        if not count:
            raise ConnectionLost("the broker closed a connection in the middle of the load")
        return bytes(self._space[:count])

    def _receive(self) -> int:
        """A signal, or a stop of this process, makes the kernel begin to wait anew: the deadline is ours."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        flags = socket.MSG_DONTWAIT if self._polls else 0
        while True:
            try:
                return self._socket.recv_into(self._space, 0, flags)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise


class Links(Closing):
    """All connections of one load; `with` closes them."""

    def __init__(
        self,
        address: str,
        count: int,
        greet: Callable[[socket.socket], object] = lambda connected: None,
        *,
        polls: bool = False,
        tls: ClientTls | None = None,
    ) -> None:
        """`greet` is called with each socket while the socket still blocks. With `polls` the thread never sleeps."""
        self._greet = greet
        self._polls = polls
        self._tls = tls
        self._epoll = select.epoll()
        # One buffer for all: allocating the largest size at each read costs more than copying the bytes out of it.
        self._space = memoryview(bytearray(_READ_AT_ONCE))
        self.all: list[Link] = []
        self._by_descriptor: dict[int, Link] = {}
        try:
            for _ in range(count):
                self._add(address)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> list[Link]:
        """Wait for connections with something to read, for at most `seconds`, with a precision of microseconds."""
        readable = []
        for descriptor, event in self._events(seconds):
            link = self._by_descriptor[descriptor]
            if event != select.EPOLLIN:
                if event & select.EPOLLOUT:
                    link.write_waiting()
                if not event & ~select.EPOLLOUT:
                    continue
            readable.append(link)
        return readable

    def _events(self, seconds: float) -> list[tuple[int, int]]:
        if self._polls:
            return self._poll_until(time.monotonic() + seconds)
        if seconds >= _LONG_SECONDS:  # epoll counts in milliseconds, which is precise enough here
            return self._epoll.poll(seconds, 1024)
        if seconds <= _WAKING_SECONDS:
            select.select((self._epoll,), (), (), max(seconds, 0.0))
            return self._epoll.poll(0, 1024)
        deadline = time.monotonic() + seconds
        select.select((self._epoll,), (), (), seconds - _WAKING_SECONDS)
        return self._poll_until(deadline)

    def _poll_until(self, deadline: float) -> list[tuple[int, int]]:
        while not (events := self._epoll.poll(0, 1024)) and time.monotonic() < deadline:
            pass
        return events

    def close(self) -> None:
        for link in self.all:
            link.close()
        self._epoll.close()

    def _add(self, address: str) -> None:
        connected = open_socket(address, self._tls)
        link = Link(connected, self._epoll, self._space)
        self.all.append(link)
        self._by_descriptor[link.descriptor] = link
        self._greet(connected)
        connected.setblocking(False)
        self._epoll.register(link.descriptor, select.EPOLLIN)


def open_socket(address: str, tls: ClientTls | None = None) -> socket.socket:
    """A connected, blocking socket."""
    host, port = split_address(address)
    try:
        connected = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected if tls is None else tls.context().wrap_socket(connected, server_hostname=host)
    except OSError as error:
        reason = error.strerror or error if tls is None else client_failure(error)
        raise ConnectFailed(f"cannot connect to {address}: {reason}") from None
