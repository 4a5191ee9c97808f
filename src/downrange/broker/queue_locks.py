"""Which consumer of a group holds which queue, for orderly consumption. Kept in memory only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from downrange.model.message import MessageQueue

LOCK_LIVES_MILLIS: Final = 60_000


class QueueLocks:
    """(group, queue) -> (client id, time of its last request). Any client can take a lock not renewed for a minute."""

    def __init__(self) -> None:
        self._locks: dict[str, dict[MessageQueue, tuple[str, int]]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now: int) -> list[MessageQueue]:
        """Lock those of the queues that are free or held by `client_id` already; return the queues it holds now."""
        locks = self._locks.setdefault(group, {})
        held = []
        for queue in queues:
            owner, since = locks.get(queue, (client_id, now))
            if owner == client_id or since + LOCK_LIVES_MILLIS < now:
                locks[queue] = (client_id, now)
                held.append(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Release those of the queues that the client holds."""
        locks = self._locks.get(group, {})
        for queue in queues:
            if locks.get(queue, ("", 0))[0] == client_id:
                del locks[queue]
        if not locks:
            self._locks.pop(group, None)

    def is_locked(self, group: str, queue: MessageQueue, now: int) -> bool:
        lock = self._locks.get(group, {}).get(queue)
        return lock is not None and lock[1] + LOCK_LIVES_MILLIS >= now
