"""Brokers that owe answers: perhaps another broker is master by now.

A master whose process dies closes its connections, and the first error asks for the new route. A master that hangs, or
that cannot be reached, says nothing. So a client looks at the routes of a broker that is silent, and when they name
another master, it breaks off the connection to the old one: what was asked there is asked of the new master at once,
not after its time-out. Such a message may be stored twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Final, Protocol

from downrange.clock import Clock
from downrange.protocol.codes import RequestCode
from downrange.transport.outstanding import Asked

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


class Link(Protocol):
    """A connection to a broker, of the event loop or of threads."""

    @property
    def requests(self) -> Mapping[int, Asked]:
        """The requests that wait for their answers, by opaque."""

    def abort(self) -> None:
        """Break the connection off: all requests that wait for an answer get ConnectionLost."""


Links = Callable[[str], Iterable[Link]]
"""The open connections to an address."""


def is_silent(link: Link, now: float) -> bool:
    """Whether an answer is overdue; `now` is the monotonic time."""
    for _, deadline, code, timeout, _ in tuple(link.requests.values()):  # other threads may add to it meanwhile
        if code not in _LONG_POLLS:
            return now - (deadline - timeout) > SILENT_SECONDS
    return False


class SilentBrokers:
    """Looks after the connections of one session to masters. Used on the session's event loop."""

    def __init__(
        self, clock: Clock, links: Links, masters: Callable[[], frozenset[str]], look_up: Callable[[str], None]
    ) -> None:
        """`masters` are the addresses that the routes name; `look_up` asks for the routes of one of them."""
        self._clock = clock
        self._links: tuple[Links, ...] = (links,)
        self._masters = masters
        self._look_up = look_up
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"<SilentBrokers {sorted(self._seen)}>"

    def watch(self, addresses: Iterable[str]) -> None:
        """Watch the connections to these brokers, also when no route names them any more."""
        self._seen.update(addresses)

    def add(self, links: Links) -> None:
        """Look after these connections, too. For any thread, as is `remove`."""
        self._links = (*self._links, links)

    def remove(self, links: Links) -> None:
        self._links = tuple(each for each in self._links if each != links)

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Ask for the routes of masters that are silent; break off connections to those that are no masters now."""
        now = monotonic()
        silent: dict[str, list[Link]] = {}
        for address in self._seen:
            found = [link for links in self._links for link in links(address) if is_silent(link, now)]
            if found:
                silent[address] = found
        if silent:
            masters = self._masters()
            for address, found in silent.items():
                if address in masters:
                    self._look_up(address)
                else:
                    log.warning("connection broken off address=%s reason=silent, and not a master any more", address)
                    self._seen.discard(address)
                    for link in found:
                        link.abort()
