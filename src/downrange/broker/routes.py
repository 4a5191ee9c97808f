"""The family of commands: requests that are answered one by one, each by its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

from downrange.broker.statistics import Statistics
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame
from downrange.transport.connection import Connection
from downrange.transport.serving import CommandHandler, LaterReply, answer_frame, refuse

RouteTable = Mapping[int, CommandHandler]


class TableChanges(Protocol):
    """Changes of tables on their way to slaves."""

    @property
    def end_offset(self) -> int:
        """The end of the last one in the log."""

    async def safe(self) -> None:
        """Wait until all of them are as safe as this broker promises; raises BrokerError when they will not be."""


class NoChanges:
    """A broker whose slaves copy whole tables now and then."""

    end_offset = 0

    async def safe(self) -> None: ...


class Commands:
    """Answers requests by the handlers of their codes, and notes how long each took; unknown codes get code 3."""

    codes: frozenset[int] = frozenset()

    def __init__(self, tables: Sequence[RouteTable], statistics: Statistics) -> None:
        self._statistics = statistics
        self.changes: TableChanges = NoChanges()
        """The changes of tables that slaves have to know before a request that made one is answered."""
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
        before = self.changes.end_offset
        reply = self.routes.get(command.code, refuse)(command, origin)
        if self.changes.end_offset != before and reply is not None:
            reply = asyncio.ensure_future(self._when_safe(reply))
        if isinstance(reply, Command):
            self._note(command.code, start, reply)
        elif reply is not None:
            reply.add_done_callback(partial(self._note_later, command.code, start))
        return reply

    async def _when_safe(self, reply: Command | LaterReply) -> Command | None:
        await self.changes.safe()
        return reply if isinstance(reply, Command) else await reply

    def _note(self, code: int, start: float, reply: Command) -> None:
        self._statistics.rpc(code, reply.code, (perf_counter() - start) * 1000)

    def _note_later(self, code: int, start: float, later: LaterReply) -> None:
        if not later.cancelled() and later.exception() is None and (reply := later.result()) is not None:
            self._note(code, start, reply)
