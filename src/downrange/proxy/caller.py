"""The client behind a call, as the headers of the call describe it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from downrange.proxy.errors import Refused
from downrange.proxy.http2.stream import Stream
from downrange.proxy.wire.enums import Code

_UNITS: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")


@dataclass(frozen=True, slots=True)
class Caller:
    client_id: str
    peer: str
    """Host and port."""
    version: str
    deadline: float | None
    """By the clock of the event loop."""
    headers: Mapping[bytes, bytes]

    @property
    def call(self) -> str:
        """The name of the method that is called."""
        return self.header(b":path").rpartition("/")[2]

    @property
    def host(self) -> str:
        return self.peer.rpartition(":")[0]

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("utf-8", "replace")

    def require_client_id(self) -> None:
        if not self.client_id:
            raise Refused(Code.CLIENT_ID_REQUIRED, "client id cannot be empty")


def caller_of(stream: Stream, now: float) -> Caller:
    headers = stream.headers
    timeout = timeout_seconds(headers.get(b"grpc-timeout"))
    return Caller(
        headers.get(b"x-mq-client-id", b"").decode("utf-8", "replace"),
        stream.connection.peer,
        headers.get(b"x-mq-client-version", b"").decode("utf-8", "replace"),
        None if timeout is None else now + timeout,
        headers,
    )


def timeout_seconds(text: bytes | None) -> float | None:
    """The time that a client waits for an answer; None when it does not say."""
    found = None if text is None else _TIMEOUT.fullmatch(text)
    return None if found is None else int(found[1]) * _UNITS[found[2]]
