"""A coordination service in memory, for tests: revisions, leases by a clock, and calls that fail when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from downrange.clock import Clock
from downrange.controller.coordination import (
    Committed,
    Compare,
    Delete,
    Found,
    KeyValue,
    Lease,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Target,
)


class MemoryStore:
    """One service; all controllers of a test share it. Leases end when the clock says so, at the next call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: dict[str, KeyValue] = {}
        self._leases: dict[int, tuple[int, float, set[str]]] = {}
        self._changes: dict[str, int] = {}
        self._changed = asyncio.Event()
        self.revision = 1
        self.is_down = False
        """Whether every call fails before it does anything."""
        self.loses_next_answer = False
        """Whether the next transaction is carried out without its caller learning of it."""

    async def range(self, key: str, *, is_prefix: bool = False) -> Found:
        self._enter()
        names = [name for name in sorted(self._items) if (name.startswith(key) if is_prefix else name == key)]
        return Found(self.revision, tuple(self._items[name] for name in names))

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Committed:
        self._enter()
        if not all(self._holds(compare) for compare in compares):
            found = (self._items.get(compare.key) for compare in compares)
            return Committed(False, self.revision, tuple(item for item in found if item is not None))
        if operations:
            self.revision += 1
        for operation in operations:
            self._apply(operation)
        if self.loses_next_answer:
            self.loses_next_answer = False
            raise OutcomeUnknown("the store did not answer")
        return Committed(True, self.revision)

    async def lease_grant(self, ttl: int) -> Lease:
        self._enter()
        self.revision += 1
        self._leases[self.revision] = (ttl, self._clock.monotonic() + ttl, set())
        return Lease(self.revision, ttl)

    async def lease_keepalive(self, lease: int, timeout: float) -> int:
        self._enter()
        if lease not in self._leases:
            return 0
        ttl, _, keys = self._leases[lease]
        self._leases[lease] = (ttl, self._clock.monotonic() + ttl, keys)
        return ttl

    async def watch(self, key: str, revision: int, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                while self._changes.get(key, 0) < revision:
                    self._enter()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """There is nothing to close."""

    def revoke(self, lease: int) -> None:
        """End a lease before its time."""
        _, _, keys = self._leases.pop(lease)
        self.revision += 1
        for key in keys:
            self._apply(Delete(key))

    def _enter(self) -> None:
        if self.is_down:
            raise StoreUnavailable("the store is down")
        now = self._clock.monotonic()
        for lease in [lease for lease, (_, until, _) in self._leases.items() if until < now]:
            self.revoke(lease)

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        if item is None:
            return compare.revision == 0
        actual = item.create_revision if compare.target is Target.CREATED else item.mod_revision
        return actual == compare.revision

    def _apply(self, operation: Put | Delete) -> None:
        before = self._items.pop(operation.key, None)
        if isinstance(operation, Put):
            created = self.revision if before is None else before.create_revision
            self._items[operation.key] = KeyValue(operation.key, operation.value, created, self.revision)
            if operation.lease:
                self._leases[operation.lease][2].add(operation.key)
        self._changes[operation.key] = self.revision
        self._changed.set()
        self._changed = asyncio.Event()
