"""Which handler answers which request, and how long each took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Final

from downrange.broker.flow_control import FlowControl
from downrange.broker.pulls import Pulls
from downrange.broker.statistics import Statistics
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame, FrameDecoder, encode
from downrange.transport.connection import Connection
from downrange.transport.handler import Express, LaterReply, refuse

RequestHandler = Callable[[Command, Connection], Command | LaterReply | None]
RouteTable = Mapping[int, RequestHandler]

_SENDS: Final = frozenset(
    map(int, (RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE))
)


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


def _timed(
    handle: RequestHandler, statistics: Statistics, command: Command, connection: Connection
) -> Command | LaterReply | None:
    """Answer, and note how long it took; a reply that comes later is timed when it does."""
    start = perf_counter()
    reply = handle(command, connection)
    if isinstance(reply, Command):
        _note(statistics, command.code, reply.code, start)
    elif reply is not None:
        reply.add_done_callback(partial(_note_later, statistics, command.code, start))
    return reply


def _note(statistics: Statistics, request_code: int, response_code: int, start: float) -> None:
    millis = (perf_counter() - start) * 1000
    statistics.rpc(request_code, response_code, millis)
    if request_code in _SENDS:
        statistics.put_latency(millis)


def _note_later(statistics: Statistics, request_code: int, start: float, later: LaterReply) -> None:
    if not later.cancelled() and later.exception() is None and (reply := later.result()) is not None:
        _note(statistics, request_code, reply.code, start)


# TEMPORARY from here on: the old transport calls an express and a table of handlers; the new one calls `Pulls.take`.

_JSON_STARTS: Final = b'{"code":11,', b'{"code":361,'
_BINARY_STARTS: Final = (11).to_bytes(2, "big"), (361).to_bytes(2, "big")


def _is_pull(frame: Frame) -> bool:
    return frame[1].startswith(_BINARY_STARTS if frame[0] else _JSON_STARTS)


def pulls_of_old_transport(pulls: Pulls, flow: FlowControl) -> tuple[Express, RouteTable]:  # TEMPORARY
    def take(frames: list[Frame], at: int, connection: Connection) -> int:
        if not _is_pull(frames[at]) or connection.last_received - flow.last_tick > flow.pull_patience:
            return at
        stop, count = at + 1, len(frames)
        while stop < count and _is_pull(frames[stop]):
            stop += 1
        pulls.take(frames, [connection] * count, at, stop)
        return stop

    def handle(command: Command, connection: Connection) -> None:
        flow.check_pull()
        pulls.take(FrameDecoder().frames(encode(command)), [connection], 0, 1)

    return take, {RequestCode.PULL_MESSAGE: handle, RequestCode.LITE_PULL_MESSAGE: handle}
