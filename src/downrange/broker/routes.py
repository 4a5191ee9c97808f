"""Which handler answers which request, and how long each took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.statistics import Statistics
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame
from downrange.transport.connection import Connection
from downrange.transport.serving import CommandHandler, LaterReply, Serve, answer_frame, refuse

# TEMPORARY: until the request families serve frames themselves.
Express = Callable[[list[Frame], int, Connection], int]
RequestHandler = Callable[[Command, Connection], Command | LaterReply | None]
RouteTable = Mapping[int, RequestHandler]

_SENDS: Final = frozenset(
    map(int, (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE))
)
_PULL: Final = int(RequestCode.PULL_MESSAGE)


def handler_of(
    *tables: RouteTable, statistics: Statistics | None = None, without: frozenset[int] = frozenset()
) -> RequestHandler:
    """One handler for all requests of the tables; what none of them knows is refused with code 3."""
    routes: dict[int, RequestHandler] = {}
    for table in tables:
        twice = routes.keys() & table.keys()
        assert not twice, f"two handlers for {twice}"
        routes.update((int(code), handler) for code, handler in table.items() if code not in without)
    find = routes.get

    def handle(command: Command, connection: Connection) -> Command | LaterReply | None:
        return find(command.code, refuse)(command, connection)

    return handle if statistics is None else partial(_timed, handle, statistics)


def express_of(*lanes: Express) -> Express:
    """One short cut made of several; each takes what it knows at the front of the frames."""

    def take(frames: list[Frame], at: int, connection: Connection) -> int:
        count = len(frames)
        for lane in lanes:
            at = lane(frames, at, connection)
            if at == count:
                break
        return at

    return take


def serve_of(express: Express | None, handler: CommandHandler) -> Serve:
    """TEMPORARY: a `Serve` of a short cut and a handler."""

    def serve(frames: list[Frame], origins: list[Connection]) -> None:
        start, count = 0, len(frames)
        while start < count:
            origin, stop = origins[start], start + 1
            while stop < count and origins[stop] is origin:
                stop += 1
            mine = frames if stop - start == count else frames[start:stop]
            at, end, start = 0, stop - start, stop
            while at < end:
                first = at
                if express is not None and not origin.is_full and not origin.is_overloaded:
                    at = express(mine, at, origin)
                if at == first:
                    answer_frame(handler, mine[at], origin)
                    at += 1
            origin.flush()

    return serve


def _timed(
    handle: RequestHandler, statistics: Statistics, command: Command, connection: Connection
) -> Command | LaterReply | None:
    """Answer, and note how long it took; a reply that comes later is timed when it does."""
    start = perf_counter()
    reply = handle(command, connection)
    if isinstance(reply, Command):
        _note(statistics, command.code, reply.code, start)
    elif reply is not None and command.code != _PULL:  # a held pull waits for messages, not for the broker
        reply.add_done_callback(partial(_note_later, statistics, command.code, start))
    return reply


def _note(statistics: Statistics, request_code: int, response_code: int, start: float) -> None:
    millis = (perf_counter() - start) * 1000
    statistics.rpc(request_code, response_code, millis)
    if request_code in _SENDS:
        statistics.put_latency(millis)
    elif request_code == _PULL:
        statistics.get_latency(millis)


def _note_later(statistics: Statistics, request_code: int, start: float, later: LaterReply) -> None:
    if not later.cancelled() and later.exception() is None and (reply := later.result()) is not None:
        _note(statistics, request_code, reply.code, start)
