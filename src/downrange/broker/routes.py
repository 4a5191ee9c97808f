"""The family of commands: requests that are answered one by one, each by its handler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter

from downrange.broker.statistics import Statistics
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame
from downrange.transport.connection import Connection
from downrange.transport.serving import CommandHandler, LaterReply, answer_frame, refuse

RouteTable = Mapping[int, CommandHandler]


class Commands:
    """Answers requests by the handlers of their codes, and notes how long each took; unknown codes get code 3."""

    codes: frozenset[int] = frozenset()

    def __init__(self, tables: Sequence[RouteTable], statistics: Statistics) -> None:
        self._statistics = statistics
        self.routes: dict[int, CommandHandler] = {}
        for table in tables:
            twice = self.routes.keys() & table.keys()
            assert not twice, f"two handlers for {twice}"
            self.routes.update((int(code), handler) for code, handler in table.items())

    def take(self, frames: list[Frame], origins: list[Connection], at: int, stop: int) -> None:
        for frame, origin in zip(frames[at:stop], origins[at:stop], strict=True):
            answer_frame(self.answer, frame, origin)
            origin.flush()

    def answer(self, command: Command, origin: Connection) -> Command | LaterReply | None:
        """Answer one command; a reply that comes later is timed when it does."""
        start = perf_counter()
        reply = self.routes.get(command.code, refuse)(command, origin)
        if isinstance(reply, Command):
            self._note(command.code, start, reply)
        elif reply is not None:
            reply.add_done_callback(partial(self._note_later, command.code, start))
        return reply

    def _note(self, code: int, start: float, reply: Command) -> None:
        self._statistics.rpc(code, reply.code, (perf_counter() - start) * 1000)

    def _note_later(self, code: int, start: float, later: LaterReply) -> None:
        if not later.cancelled() and later.exception() is None and (reply := later.result()) is not None:
            self._note(code, start, reply)
