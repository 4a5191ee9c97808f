"""Which handler answers which request, and the door where a broker's errors become reply codes (see `error_reply`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from downrange.protocol.command import Command
from downrange.transport.connection import Connection, LaterReply, refuse

RequestHandler = Callable[[Command, Connection], Command | LaterReply | None]
RouteTable = Mapping[int, RequestHandler]


def handler_of(*tables: RouteTable, without: frozenset[int] = frozenset()) -> RequestHandler:
    """One handler for all requests of the tables; what none of them knows is refused with code 3."""
    routes: dict[int, RequestHandler] = {}
    for table in tables:
        twice = routes.keys() & table.keys()
        assert not twice, f"two handlers for {twice}"
        routes.update((int(code), handler) for code, handler in table.items() if code not in without)
    find = routes.get

    def handle(command: Command, connection: Connection) -> Command | LaterReply | None:
        return find(command.code, refuse)(command, connection)

    return handle
