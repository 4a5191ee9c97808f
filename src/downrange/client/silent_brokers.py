"""Brokers that owe answers: perhaps another broker is master by now.

A master whose process dies closes its connections, and the first error asks for the new route. A master that hangs, or
that cannot be reached, says nothing. So a client looks at the routes of a broker that is silent, and when they name
another master, it breaks off the connection to the old one: what was asked there is asked of the new master at once,
not after its time-out. Such a message may be stored twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from downrange.clock import Clock
from downrange.protocol.codes import RequestCode
from downrange.transport.connection import Connection

log = logging.getLogger(__name__)

SILENT_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.25
_LONG_POLLS: Final = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.POP_MESSAGE,
        RequestCode.NOTIFICATION,
    }
)
"""Requests whose answer may take long though the broker is well."""


def is_silent(connection: Connection, now: float) -> bool:
    """Whether an answer is overdue; `now` is the time of the connection's loop."""
    for _, deadline, code, timeout, _ in connection.requests.values():
        if code not in _LONG_POLLS:
            return now - (deadline - timeout) > SILENT_SECONDS
    return False


class SilentBrokers:
    """Looks after the connections of one session to masters. Used on the session's event loop."""

    def __init__(
        self,
        clock: Clock,
        connection: Callable[[str], Connection | None],
        masters: Callable[[], frozenset[str]],
        look_up: Callable[[str], None],
    ) -> None:
        """`masters` are the addresses that the routes name; `look_up` asks for the routes of one of them."""
        self._clock = clock
        self._connection = connection
        self._masters = masters
        self._look_up = look_up
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"<SilentBrokers {sorted(self._seen)}>"

    def watch(self, addresses: Iterable[str]) -> None:
        """Watch the connections to these brokers, also when no route names them any more."""
        self._seen.update(addresses)

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Ask for the routes of masters that are silent; break off connections to those that are no masters now."""
        now = asyncio.get_running_loop().time()
        silent = []
        for address in self._seen:
            connection = self._connection(address)
            if connection is not None and is_silent(connection, now):
                silent.append((address, connection))
        if silent:
            masters = self._masters()
            for address, connection in silent:
                if address in masters:
                    self._look_up(address)
                else:
                    log.warning("connection broken off address=%s reason=silent, and not a master any more", address)
                    self._seen.discard(address)
                    connection.abort()
