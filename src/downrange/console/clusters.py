"""The clusters of a console: a session, a snapshot, a history and a sampler for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.clock import Clock
from downrange.console.history import History
from downrange.console.snapshot import Snapshot
from downrange.model.errors import MQError

ANSWER_SECONDS: Final = 2.0
"""How long a broker may take for one answer; one that needs longer is asked alone, later."""


class UnknownCluster(MQError):
    """No cluster of this console has that name."""


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
        self.admin = Admin(self.config)
        self.clock = clock
        self.snapshot = Snapshot(name)
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

    async def close(self) -> None:
        await self.admin.session.close()
