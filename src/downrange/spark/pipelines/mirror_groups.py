"""The offsets of a consumer group at the other side of a mirror, so that the group can go on there.

A mirrored message has its offset at the source in a property, and the messages of a queue are mirrored in order. So the
place of a group is found by bisection: behind a message that the group has consumed, in front of one that it has not.
When a mirror was killed and sent messages again, any such place will do: whatever follows a message at the source,
follows every copy of this message at the target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from downrange.client.admin import Admin
from downrange.client.admin.offsets import QueueMove, read_queues
from downrange.client.admin.queue_reading import committed_at, pull_from
from downrange.client.brokers import Broker, master_of, reachable
from downrange.client.errors import NoRoute
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue
from downrange.spark.mirror_rows import QueueMap, origin_offset
from downrange.spark.mirror_sending import last_of_origin

log = logging.getLogger(__name__)


class GroupPlace(NamedTuple):
    """One queue of a group: its offset at the source, and the offset at the target from which it would go on."""

    group: str
    queue: MessageQueue
    committed: int
    target: MessageQueue
    target_offset: int
    target_committed: int | None

    @property
    def is_ahead(self) -> bool:
        """Whether the group has not come as far at the target: its offset is only ever moved forward."""
        return self.target_committed is None or self.target_committed < self.target_offset


class Sides(NamedTuple):
    """The clusters of a mirror, and its queues."""

    source: Admin
    target: Admin
    queues: QueueMap
    target_name: str


async def places(sides: Sides, group: str, topics: Sequence[str]) -> list[GroupPlace]:
    """Where a group would go on at the target, for each queue that it has committed at the source."""
    found = []
    for topic in topics:
        try:
            route = await sides.source.topics.route(topic)
        except NoRoute:
            continue
        for data in route.broker_datas:
            broker = reachable(master_of(data))
            for queue in read_queues(route, topic, broker):
                committed = await committed_at(sides.source.session, broker, group, queue)
                if committed is not None:
                    found.append(await _place(sides, group, broker, queue, committed))
    return found


async def _place(sides: Sides, group: str, broker: Broker, queue: MessageQueue, committed: int) -> GroupPlace:
    target = sides.queues.target(queue)
    there = await sides.target.session.broker(target.broker_name)
    offset = await position(sides.target, there, target, sides.queues.origin(queue), committed)
    # Messages that were sent at the target and come to the source by a mirror in the other direction.
    origin = f"{sides.target_name}/{target.broker_name}/{target.queue_id}/"
    seen = await last_of_origin(sides.source.session, broker, queue, origin, before=committed)
    if seen is not None:
        offset = min(offset, seen + 1)
    now = await committed_at(sides.target.session, there, group, target)
    return GroupPlace(group, queue, committed, target, offset, now)


async def position(admin: Admin, broker: Broker, queue: MessageQueue, origin: str, committed: int) -> int:
    """The offset in `queue` behind a message of `origin` before `committed`, in front of the next one of `origin`."""
    there = await pull_from(admin.session, broker, queue, 0, 1)
    low, high = there.min_offset, there.max_offset
    while low < high:
        middle = (low + high) // 2
        found = await _next_of_origin(admin, broker, queue, origin, middle, high)
        if found is None or found[1] >= committed:
            high = middle
        else:
            low = found[0] + 1
    return max(low, 0)


async def _next_of_origin(
    admin: Admin, broker: Broker, queue: MessageQueue, origin: str, begin: int, end: int
) -> tuple[int, int] | None:
    """The offsets, here and at its origin, of the first message of `origin` from `begin` up to `end`."""
    at = begin
    while at < end:
        pulled = await pull_from(admin.session, broker, queue, at)
        for message in pulled.messages:
            offset = origin_offset(message.properties, origin)
            if offset is not None:
                return (message.queue_offset, offset) if message.queue_offset < end else None
        if pulled.next_offset <= at:
            return None
        at = pulled.next_offset
    return None


async def carry_over(sides: Sides, group: str, topics: Sequence[str]) -> int:
    """Commit a group at the target where it is at the source; returns how many queues moved forward.

    Brokers on which members of the group are running are left alone: they know better.
    """
    moves: dict[Broker, list[QueueMove]] = {}
    for place in await places(sides, group, topics):
        if place.is_ahead:
            broker = await sides.target.session.broker(place.target.broker_name)
            moves.setdefault(broker, []).append(QueueMove(place.target, None, None, place.target_offset))
    moved = 0
    for broker, wanted in moves.items():
        try:
            if await sides.target.groups.connections_on(broker, group) is not None:
                continue
            await _create_group(sides, group, broker)
            outcome = await sides.target.offsets.write(group, {broker: wanted})
            for error in outcome.failed.values():
                raise error
            moved += len(wanted)
        except MQError as error:
            log.warning("group not carried over group=%s broker=%s reason=%s", group, broker, error)
    return moved


async def _create_group(sides: Sides, group: str, broker: Broker) -> None:
    """Create a group at the target with the settings that it has at the source."""
    if group in await sides.target.groups.configs_of(broker):
        return
    for master in await sides.source.session.masters():
        config = (await sides.source.groups.configs_of(reachable(master))).get(group)
        if config is not None:
            created = await sides.target.groups.create(config, broker=broker.name)
            for error in created.failed.values():
                raise error
            return
