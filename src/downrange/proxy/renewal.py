"""Leases of push consumers, which are renewed while the consumer lives: its listener may take hours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.protocol.errors import BrokerError
from downrange.proxy.backend import Backend
from downrange.proxy.handles import Handle

log = logging.getLogger(__name__)

FIRST_MILLIS: Final = 60_000
"""The invisible time of a receive that wants renewal."""
RELEASED_MILLIS: Final = 1000
"""Messages of a consumer that went away are visible again after this time."""
_AHEAD_MILLIS: Final = 10_000
_PAUSE_SECONDS: Final = 2.0
_STEPS: Final = (60_000, 180_000, 300_000, 600_000, 1_800_000, 3_600_000)
_LONGEST_MILLIS: Final = 3 * 3_600_000
_MOST_FAILURES: Final = 3
_AT_ONCE: Final = 32


@dataclass(eq=False, slots=True)
class Lease:
    """A message that a push consumer works on. `handle` is the one in force; the consumer knows the first one."""

    client_id: str
    topic: str
    group: str
    handle: Handle
    since: int
    renewals: int = 0
    failures: int = 0


class Renewal:
    """The leases by the handle that the consumer knows."""

    def __init__(self, backend: Backend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._by_client: dict[str, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __repr__(self) -> str:
        return f"<Renewal {len(self)} leases of {len(self._by_client)} clients>"

    def add(self, client_id: str, topic: str, group: str, handle: Handle) -> None:
        self._leases[str(handle)] = Lease(client_id, topic, group, handle, self._clock.now())
        self._by_client.setdefault(client_id, {})[str(handle)] = None

    def take(self, text: str) -> Handle | None:
        """The handle in force, if the consumer's handle is of a lease here; the lease ends."""
        lease = self._leases.pop(text, None)
        if lease is None:
            return None
        held = self._by_client.get(lease.client_id, {})
        held.pop(text, None)
        if not held:
            self._by_client.pop(lease.client_id, None)
        return lease.handle

    @property
    def clients(self) -> Iterable[str]:
        """Clients that hold leases."""
        return list(self._by_client)

    async def release(self, client_id: str) -> None:
        """Let others have the messages of a client that went away."""
        held = [(text, self._leases[text]) for text in self._by_client.get(client_id, {})]
        for text, _ in held:
            self.take(text)
        for start in range(0, len(held), _AT_ONCE):
            await asyncio.gather(*(self._give_up(lease) for _, lease in held[start : start + _AT_ONCE]))

    async def _give_up(self, lease: Lease) -> None:
        try:
            await self._backend.change_invisible(lease.topic, lease.group, lease.handle.lease, RELEASED_MILLIS)
        except MQError as error:  # then it is visible when its time is over
            log.info("message not released group=%s handle=%s reason=%s", lease.group, lease.handle, error)

    async def run(self) -> None:
        """Renew what is about to expire, for ever."""
        while True:
            await self._clock.sleep(_PAUSE_SECONDS)
            await self.renew()

    async def renew(self) -> None:
        now = self._clock.now()
        due = [(text, lease) for text, lease in self._leases.items() if lease.handle.expires() - now <= _AHEAD_MILLIS]
        for start in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._renew(text, lease, now) for text, lease in due[start : start + _AT_ONCE]))

    async def _renew(self, text: str, lease: Lease, now: int) -> None:
        if now - lease.since > _LONGEST_MILLIS or lease.handle.expires() <= now:
            self.take(text)
            return
        step = _STEPS[min(lease.renewals, len(_STEPS) - 1)]
        try:
            new = await self._backend.change_invisible(lease.topic, lease.group, lease.handle.lease, step)
        except MQError as error:
            lease.failures += 1
            if isinstance(error, BrokerError) or lease.failures > _MOST_FAILURES:
                log.info("lease not renewed group=%s handle=%s reason=%s", lease.group, lease.handle, error)
                self.take(text)
            return
        lease.renewals += 1
        lease.failures = 0
        lease.handle = Handle(new, lease.handle.log_offset)
