"""Which queues of a topic a consumer of a group takes: every member computes its own share.

So all members, Java's among them, must come to the same result from the same facts: the queues sorted by topic, broker
name and queue id, the client ids sorted as texts. A member that is not in the list of ids gets nothing.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from downrange.model.message import MessageQueue
from downrange.settings import ConfigError

VIRTUAL_NODES: Final = 10


class AllocationStrategy(Protocol):
    """A rule for sharing queues. `name` is RocketMQ's."""

    @property
    def name(self) -> str: ...

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        """The queues of `client_id`; both sequences are sorted as `allocate` sorts them."""
        ...


def allocate(
    strategy: AllocationStrategy, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]
) -> list[MessageQueue]:
    """The share of one member. The order of the arguments' elements does not matter."""
    # A broker lists a client once per connection. Java compares texts by UTF-16 units.
    members = sorted(client_ids, key=lambda text: text.encode("utf-16-be", "surrogatepass"))
    return strategy.share(client_id, sorted(queues), members)


@dataclass(frozen=True, slots=True)
class Averagely:
    """Runs of neighbours, as even as can be; the first members get one more when it does not divide."""

    name: str = "AVG"

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        if client_id not in client_ids:
            return []
        index = client_ids.index(client_id)
        each, rest = divmod(len(queues), len(client_ids))
        size = each + (1 if index < rest else 0)
        start = index * each + min(index, rest)
        return list(queues[start : start + size])


@dataclass(frozen=True, slots=True)
class AveragelyByCircle:
    """One queue each in turn."""

    name: str = "AVG_BY_CIRCLE"

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        if client_id not in client_ids:
            return []
        return list(queues[client_ids.index(client_id) :: len(client_ids)])


@dataclass(frozen=True, slots=True)
class ConsistentHash:
    """A ring of MD5 points: when a member comes or goes, only queues next to its points change hands."""

    name: str = "CONSISTENT_HASH"
    virtual_nodes: int = VIRTUAL_NODES

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        if client_id not in client_ids:
            return []
        ring = {_point(f"{member}-{node}"): member for member in client_ids for node in range(self.virtual_nodes)}
        points = sorted(ring)

        def owner(queue: MessageQueue) -> str:
            text = f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"
            return ring[points[bisect.bisect_left(points, _point(text)) % len(points)]]

        return [queue for queue in queues if owner(queue) == client_id]


def _point(text: str) -> int:
    return int.from_bytes(hashlib.md5(text.encode(), usedforsecurity=False).digest()[:4], "big")


@dataclass(frozen=True, slots=True)
class ByMachineRoom:
    """Only queues of the rooms named, as in broker name `room@broker`; the rest goes round one by one."""

    rooms: frozenset[str]
    name: str = "MACHINE_ROOM"

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        if client_id not in client_ids:
            return []
        near = [queue for queue in queues if _room(queue) in self.rooms]
        index = client_ids.index(client_id)
        each, rest = divmod(len(near), len(client_ids))
        mine = near[index * each : index * each + each]
        if index < rest:
            mine.append(near[each * len(client_ids) + index])
        return mine


def _room(queue: MessageQueue) -> str | None:
    room, at, name = queue.broker_name.partition("@")
    return room if at and "@" not in name else None


@dataclass(frozen=True, slots=True)
class ByConfig:
    """A fixed list of queues, whatever other members there are."""

    queues: tuple[MessageQueue, ...]
    name: str = "CONFIG"

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        return list(self.queues)


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Members share the queues of their own room; the queues of rooms without members are shared by all.

    `room_of_queue` and `room_of_client` tell the room of a queue and of a client id; every member must use the same.
    """

    within: AllocationStrategy
    room_of_queue: Callable[[MessageQueue], str]
    room_of_client: Callable[[str], str]

    @property
    def name(self) -> str:
        return f"MACHINE_ROOM_NEARBY-{self.within.name}"

    def share(self, client_id: str, queues: Sequence[MessageQueue], client_ids: Sequence[str]) -> list[MessageQueue]:
        if client_id not in client_ids:
            return []
        by_room: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_room.setdefault(self.room_of_queue(queue), []).append(queue)
        members: dict[str, list[str]] = {}
        for member in client_ids:
            members.setdefault(self.room_of_client(member), []).append(member)
        here = self.room_of_client(client_id)
        mine = self.within.share(client_id, by_room.get(here, []), members[here]) if here in by_room else []
        for room in sorted(by_room.keys() - members.keys()):
            mine += self.within.share(client_id, by_room[room], client_ids)
        return mine


_WITHOUT_SETTINGS: Final[dict[str, AllocationStrategy]] = {
    strategy.name: strategy for strategy in (Averagely(), AveragelyByCircle(), ConsistentHash())
}


def strategy_of(name: str) -> AllocationStrategy:
    """A strategy by RocketMQ's name, of those that need no settings."""
    found = _WITHOUT_SETTINGS.get(name)
    if found is None:
        raise ConfigError(f"no allocation strategy {name!r}; there are {', '.join(_WITHOUT_SETTINGS)}")
    return found
