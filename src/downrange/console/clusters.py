"""The clusters of a console: sessions to ask each with, a snapshot and a history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.errors import ClientError
from downrange.client.session import ONLY_SUCCESS, Session
from downrange.clock import Clock
from downrange.console.history import History
from downrange.console.snapshot import Snapshot
from downrange.model.text import Text
from downrange.protocol.command import Command

ANSWER_SECONDS: Final = 2.0
"""How long a broker may take for one answer; one that needs longer is asked alone, later."""


class BrokerSilent(ClientError):
    """A broker that did not answer the sampler in time is not asked on behalf of a page."""


class PageSession(Session):
    """Asks on behalf of pages. A broker that is known to be silent is not waited for: its error comes at once."""

    def __init__(self, config: ClientConfig, snapshot: Snapshot) -> None:
        super().__init__(config)
        self._snapshot = snapshot

    async def invoke(
        self, address: str, command: Command, timeout: float | None = None, accept: Collection[int] = ONLY_SUCCESS
    ) -> Command:
        state = self._snapshot.brokers.get(address)
        if state is not None and state.is_silent:
            raise BrokerSilent(Text("{name} does not answer: {error}", name=state.name, error=state.error))
        return await super().invoke(address, command, timeout, accept)


@dataclass(slots=True)
class Watched:
    """What pages show at the moment, until when (monotonic seconds): it is asked for more often."""

    until: dict[tuple[str, str], float] = field(default_factory=dict)

    def look(self, kind: str, name: str, now: float, seconds: float = 20.0) -> None:
        self.until[kind, name] = now + seconds
        if len(self.until) > 2000:
            self.until = {key: end for key, end in self.until.items() if end > now}

    def seen(self, kind: str, now: float) -> list[str]:
        return [name for (one, name), end in self.until.items() if one == kind and end > now]

    def is_seen(self, kind: str, name: str, now: float) -> bool:
        return self.until.get((kind, name), 0) > now


class Cluster:
    """One cluster: how to ask it, and what is known about it."""

    def __init__(self, name: str, config: ClientConfig, clock: Clock, metrics: Sequence[str] = ()) -> None:
        self.name = name
        self.metrics = metrics
        self.config = replace(config, connect_timeout_seconds=ANSWER_SECONDS, request_timeout_seconds=5.0)
        self.clock = clock
        self.snapshot = Snapshot(name)
        self.admin = Admin(self.config)
        """The client with which the sampler asks brokers."""
        self.page_admin = Admin(self.config, PageSession(self.config, self.snapshot))
        self.history = History()
        self.watched = Watched()

    def __repr__(self) -> str:
        return f"<Cluster {self.name} brokers={len(self.snapshot.brokers)}>"

    @property
    def namesrv(self) -> str:
        return ";".join(self.config.namesrv_addresses)

    def look(self, kind: str, name: str) -> None:
        """Somebody looks at a topic or a group: ask for it more often for a while."""
        self.watched.look(kind, name, self.clock.monotonic())

    def admin_of(self, access_key: str, secret_key: str) -> Admin:
        """To ask on behalf of an account of the cluster."""
        config = replace(self.config, access_key=access_key, secret_key=secret_key, security_token=None)
        return Admin(config, PageSession(config, self.snapshot))

    async def close(self) -> None:
        await self.admin.session.close()
        await self.page_admin.session.close()
