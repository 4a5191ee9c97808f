"""Which consumer of a group holds which queue, for orderly consumption. Kept in memory only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from downrange.model.message import MessageQueue

LOCK_LIVES_MILLIS: Final = 60_000


class QueueLocks:
    """(group, queue) -> (client id, when it last asked). A lock not renewed for a minute can be taken by anyone."""

    def __init__(self) -> None:
        self._locks: dict[str, dict[MessageQueue, tuple[str, int]]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue], now: int) -> list[MessageQueue]:
        """Take or renew what can be had; return the queues `client_id` holds of those it asked for."""
        locks = self._locks.setdefault(group, {})
        held = []
        for queue in queues:
            owner, since = locks.get(queue, (client_id, now))
            if owner == client_id or since + LOCK_LIVES_MILLIS < now:
                locks[queue] = (client_id, now)
                held.append(queue)
        return held

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Let go what is the client's own."""
        locks = self._locks.get(group, {})
        for queue in queues:
            if locks.get(queue, ("", 0))[0] == client_id:
                del locks[queue]
        if not locks:
            self._locks.pop(group, None)

    def is_locked(self, group: str, queue: MessageQueue, now: int) -> bool:
        lock = self._locks.get(group, {}).get(queue)
        return lock is not None and lock[1] + LOCK_LIVES_MILLIS >= now
