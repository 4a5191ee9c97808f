"""JSON over HTTP/1.1 by asyncio streams: as much of it as the gateway of etcd needs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from downrange.model.errors import MQError
from downrange.settings import ConfigError

MAX_HEAD: Final = 64 << 10
MAX_BODY: Final = 64 << 20


class HttpError(MQError):
    """A connection failed, or its peer does not speak HTTP as expected."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of a service."""

    host: str
    port: int
    is_tls: bool

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """`http://host:port`, `https://host:port` or `host:port`. Raises ConfigError."""
        url = text.strip() if "://" in text else f"http://{text.strip()}"
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not port or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.username:
            raise ConfigError(f"{text.strip()!r} is not an address of etcd: expected http://host:port")
        return cls(host, port, parts.scheme == "https")


class HttpConnection:
    """One connection, used by one call at a time."""

    def __init__(self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.endpoint = endpoint
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, endpoint: Endpoint, context: ssl.SSLContext | None) -> HttpConnection:
        """Connect. Raises HttpError."""
        try:
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=context if endpoint.is_tls else None, limit=MAX_BODY
            )
        except (OSError, ssl.SSLError) as error:
            raise HttpError(f"cannot connect to {endpoint}: {error.strerror or error}") from None
        return cls(endpoint, reader, writer)

    @property
    def is_usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close without sending what is queued: the peer may not read any more."""
        self._writer.transport.abort()

    async def call(self, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        """Post a JSON body; the status and the JSON of the answer. Raises HttpError."""
        try:
            await self._send(path, body, headers)
            status, answered = await self._head()
            data = b"".join([piece async for piece in self._pieces(answered)])
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{self.endpoint} broke off: {str(error) or type(error).__name__}") from None
        if answered.get("connection", "").lower() == "close":
            self.close()
        return status, self._json(data)

    async def stream(self, path: str, body: Any, headers: Mapping[str, str]) -> AsyncIterator[Any]:
        """Post a JSON body; the answer is one JSON value for each line. Raises HttpError."""
        try:
            await self._send(path, body, headers)
            status, answered = await self._head()
            rest = b""
            async for piece in self._pieces(answered):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    yield self._json(line)
            if status != 200 or rest.strip():
                yield self._json(rest)
        except (OSError, EOFError, ValueError) as error:
            raise HttpError(f"{self.endpoint} broke off: {str(error) or type(error).__name__}") from None

    async def _send(self, path: str, body: Any, headers: Mapping[str, str]) -> None:
        data = msgspec.json.encode(body)
        fields = {
            "Host": f"{self.endpoint.host}:{self.endpoint.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **headers,
        }
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._writer.write(head.encode("latin-1") + b"\r\n" + data)
        await self._writer.drain()

    async def _head(self) -> tuple[int, dict[str, str]]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            raise ValueError("a header of more than 64 KiB")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise ValueError("its answer is not HTTP/1.1")
        fields = (line.partition(":") for line in lines if line)
        return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}

    async def _pieces(self, fields: Mapping[str, str]) -> AsyncIterator[bytes]:
        if fields.get("transfer-encoding", "").lower() != "chunked":
            length = int(fields.get("content-length", "0"))
            if not 0 <= length <= MAX_BODY:
                raise ValueError(f"an answer of {length} bytes")
            yield await self._reader.readexactly(length)
            return
        while size := int((await self._reader.readuntil(b"\r\n")).partition(b";")[0], 16):
            if not 0 < size <= MAX_BODY:
                raise ValueError(f"a chunk of {size} bytes")
            yield (await self._reader.readexactly(size + 2))[:-2]
        with suppress(asyncio.IncompleteReadError):
            await self._reader.readuntil(b"\r\n")

    def _json(self, data: bytes) -> Any:
        try:
            return msgspec.json.decode(data or b"{}")
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise HttpError(f"{self.endpoint} does not answer in JSON: {data[:80]!r}") from None
