"""What the controller asks of the service that keeps its state: five calls, and two ways to fail.

`EtcdClient` (etcd.py) makes these calls to etcd; `MemoryStore` (memory_store.py) is for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from downrange.model.errors import MQError


class StoreUnavailable(MQError):
    """The service cannot be reached or refuses; nothing was changed by this call."""

    retriable = True


class OutcomeUnknown(StoreUnavailable):
    """The service was asked to change something and did not answer: it may have done so or not."""


class KeyValue(NamedTuple):
    """A stored value. Revisions count all changes of the service: one number for each change."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int


class Target(StrEnum):
    """The revision of a key that is compared; both are 0 for a key that is not there."""

    CREATED = "CREATE"
    MODIFIED = "MOD"


class Compare(NamedTuple):
    """A condition of a transaction."""

    key: str
    target: Target
    revision: int


class Put(NamedTuple):
    """Store a value; with a lease it disappears when the lease ends."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Remove a key."""

    key: str


class Found(NamedTuple):
    """What a read found, and the revision that it shows."""

    revision: int
    items: tuple[KeyValue, ...]


class Committed(NamedTuple):
    """The outcome of a transaction. If its conditions did not hold, `items` has the compared keys as they are."""

    is_done: bool
    revision: int
    items: tuple[KeyValue, ...] = ()


class Lease(NamedTuple):
    """A lease and the seconds for which it was granted, which may be more than were asked for."""

    id: int
    ttl: int


class Coordination(Protocol):
    """A linearizable key-value service with transactions, leases and a watch. Calls raise StoreUnavailable."""

    async def range(self, key: str, *, is_prefix: bool = False) -> Found:
        """The value of a key, or all keys that begin with it."""

    async def txn(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Committed:
        """Do all operations if all conditions hold, else nothing. May raise OutcomeUnknown."""

    async def lease_grant(self, ttl: int) -> Lease:
        """A lease that ends `ttl` seconds after it was last kept alive, or later."""

    async def lease_keepalive(self, lease: int, timeout: float) -> int:
        """Renew a lease; the seconds it has from now on, 0 if it is gone."""

    async def watch(self, key: str, revision: int, timeout: float) -> bool:
        """Wait until a key changes in `revision` or later; False when the time is over."""

    async def close(self) -> None:
        """Close all connections."""
