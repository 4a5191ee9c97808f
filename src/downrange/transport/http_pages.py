"""Just enough HTTP/1.1 to answer GET on a few fixed paths: one small request per connection, with a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

from downrange.transport.errors import listen_failed

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 16

_TEXT: Final = "text/plain; charset=utf-8"


class HttpReply(NamedTuple):
    status: HTTPStatus
    body: bytes
    content_type: str = _TEXT

    def encode(self) -> bytes:
        allow = "Allow: GET\r\n" if self.status is HTTPStatus.METHOD_NOT_ALLOWED else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        return head.encode("ascii") + self.body


Page = Callable[[], Awaitable[HttpReply]]


class HttpServer:
    """Serves pages by path on one listening socket.

    Holds always: at most MAX_CONNECTIONS are open, further ones are closed at once; and a client that does not send its
    request, or does not read its reply, within `seconds` is closed.
    """

    def __init__(self, pages: Mapping[str, Page], host: str, port: int, *, seconds: float = 5.0) -> None:
        self.host = host
        self.port = port
        self._pages = dict(pages)
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<HttpServer {self.host}:{self.port} connections={len(self._tasks)}>"

    async def start(self) -> None:
        """Listen; afterwards `port` is the real port."""
        try:
            self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise listen_failed(self.host, self.port, error, " for metrics") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="http")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self._answer(reader)
            if reply is not None:
                writer.write(reply.encode())
                async with asyncio.timeout(self._seconds):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (ConnectionError, TimeoutError) as error:
            log.debug("http client lost: %s", error)
        finally:
            # This closes clients that neither read nor leave; after an orderly close it does nothing.
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> HttpReply | None:
        """The reply to one request; None when the client left without a request."""
        try:
            async with asyncio.timeout(self._seconds):
                first = await reader.readexactly(1)
                if not first.isalpha():  # so begins a client of RocketMQ, which would never end a line
                    return _plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
                head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"at most {MAX_REQUEST_BYTES} bytes")
        except TimeoutError:
            return _plain(HTTPStatus.REQUEST_TIMEOUT, f"no request within {self._seconds:g} seconds")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
        method, target, _ = words
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return _plain(HTTPStatus.NOT_FOUND, "try " + ", ".join(self._pages))
        if method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        try:
            return await page()
        except Exception:  # a page that fails must not end the broker, but must be reported
            log.exception("page failed path=%s", target)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the broker's log says why")


def _plain(status: HTTPStatus, text: str) -> HttpReply:
    return HttpReply(status, f"{text}\n".encode())
