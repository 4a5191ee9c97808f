"""Which consumer of a group holds which queue, for orderly consumption.

Kept in config/queueLocks.json, a file that RocketMQ's brokers do not have, and told to slaves: a holder trusts its lock
for half a minute without asking, so a broker that forgot it would give the queue to a second consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from msgspec import field

from downrange.broker.json_file import JsonFile, SavedTable
from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import Body

LOCK_LIVES_MILLIS: Final = 60_000


class LockChange(NamedTuple):
    """A queue got a holder, still has its holder, or has none any more."""

    group: str
    queue: MessageQueue
    client_id: str | None


class _Lock(NamedTuple):
    client_id: str
    renewed: int
    told: int
    """When `on_changes` was told of it last."""


class HeldQueue(Body, frozen=True):
    """A queue and the client that holds it."""

    mq: MessageQueue
    client_id: str


class HeldQueues(Body, frozen=True):
    """The content of queueLocks.json."""

    held_queues: dict[str, list[HeldQueue]] = field(default_factory=dict)
    """By group."""


class QueueLocks(SavedTable):
    """(group, queue) -> the client that holds it. Any client can take a lock not renewed for a minute.

    `on_changes` is called with locks that were taken, given back, or held for another minute. Locks that were saved
    count from `now`: who held a queue has a minute to say so.
    """

    def __init__(self, file: JsonFile, now: int) -> None:
        super().__init__(file)
        saved = file.load(HeldQueues) or HeldQueues()
        self._locks: dict[str, dict[MessageQueue, _Lock]] = {
            group: {one.mq: _Lock(one.client_id, now, now) for one in held} for group, held in saved.held_queues.items()
        }
        self.on_changes: Callable[[Sequence[LockChange]], None] = lambda changes: None

    def table(self) -> HeldQueues:
        return HeldQueues(
            {
                group: [HeldQueue(queue, lock.client_id) for queue, lock in locks.items()]
                for group, locks in self._locks.items()
            }
        )

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now: int) -> list[MessageQueue]:
        """Lock those of the queues that are free or held by `client_id` already; return the queues it holds now."""
        locks = self._locks.setdefault(group, {})
        held, changes = [], []
        for queue in queues:
            known = locks.get(queue)
            is_own = known is not None and known.client_id == client_id
            if known is not None and not is_own and known.renewed + LOCK_LIVES_MILLIS >= now:
                continue
            told = known.told if known is not None and is_own else now - LOCK_LIVES_MILLIS
            if told + LOCK_LIVES_MILLIS <= now:
                changes.append(LockChange(group, queue, client_id))
                told = now
            locks[queue] = _Lock(client_id, now, told)
            held.append(queue)
        if changes:
            self.mark_unsaved()
            self.on_changes(changes)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release those of the queues that the client holds."""
        locks = self._locks.get(group, {})
        changes = []
        for queue in queues:
            known = locks.get(queue)
            if known is not None and known.client_id == client_id:
                del locks[queue]
                changes.append(LockChange(group, queue, None))
        if not locks:
            self._locks.pop(group, None)
        if changes:
            self.mark_unsaved()
            self.on_changes(changes)

    def is_locked(self, group: str, queue: MessageQueue, now: int) -> bool:
        lock = self._locks.get(group, {}).get(queue)
        return lock is not None and lock.renewed + LOCK_LIVES_MILLIS >= now

    def follow(self, change: LockChange, now: int) -> None:
        """Note a lock of a master, so that its holder keeps it when this slave becomes master."""
        self.mark_unsaved()
        locks = self._locks.setdefault(change.group, {})
        if change.client_id is None:
            locks.pop(change.queue, None)
        else:
            locks[change.queue] = _Lock(change.client_id, now, now)

    def renew_all(self, now: int) -> None:
        """This broker becomes master: whoever held a queue has a minute to say so here."""
        for locks in self._locks.values():
            for queue, lock in locks.items():
                locks[queue] = lock._replace(renewed=now)
