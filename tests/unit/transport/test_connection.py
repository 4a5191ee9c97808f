"""A connection on a transport that a test makes up."""

from __future__ import annotations

import asyncio

from downrange.protocol.command import Command, request
from downrange.protocol.framing import encode
from downrange.transport.connection import Connection
from downrange.transport.endpoint import Endpoint
from downrange.transport.serving import serve_commands


class Nameless(asyncio.Transport):
    """To a peer that was gone when its name was asked for; what it had sent is there nevertheless."""

    def __init__(self, connection: Connection, sent: bytes) -> None:
        super().__init__()
        self._is_closing = False
        connection.connection_made(self)
        if not self._is_closing:
            connection.data_received(sent)
        connection.connection_lost(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def abort(self) -> None:
        self._is_closing = True


async def test_who_has_gone_before_it_was_known_is_not_listened_to() -> None:
    asked: list[Command] = []
    events: list[str] = []

    def handle(command: Command, connection: Connection) -> None:
        asked.append(command)

    connection = Connection(
        Endpoint(serve_commands(handle)),
        on_open=lambda _: events.append("open"),
        on_close=lambda _: events.append("closed"),
    )
    Nameless(connection, encode(request(1), 1))
    assert asked == []
    assert events == ["open", "closed"]
