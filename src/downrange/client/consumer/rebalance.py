"""Sharing the queues of a topic within a group: the members, the share of one of them, and the changes it makes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from downrange.client.consumer.addresses import masters_of_route
from downrange.client.consumer.allocation import AllocationStrategy, allocate
from downrange.client.errors import NoRoute
from downrange.client.session import Session
from downrange.clock import Clock, sleep_or_set
from downrange.model.message import MessageQueue
from downrange.model.topics import Perm
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import ConsumerGroupRequest, ConsumerIds
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request

if TYPE_CHECKING:
    from downrange.client.consumer.config import ConsumerConfig
    from downrange.client.consumer.lite_pull_config import LitePullConfig

log = logging.getLogger(__name__)

REBALANCE_SECONDS: Final = 20.0
FIRST_RETRY_SECONDS: Final = 1.0


def readable_queues(topic: str, route: TopicRouteData) -> tuple[MessageQueue, ...]:
    """Every queue of a topic that may be read, sorted as all members of a group sort them."""
    return tuple(
        sorted(
            MessageQueue(topic, data.broker_name, queue_id)
            for data in route.queue_datas
            if data.perm & Perm.READ
            for queue_id in range(data.read_queue_nums)
        )
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """The queues to give up and the queues to take, so that exactly the consumer's share is held."""

    removed: tuple[MessageQueue, ...] = ()
    added: tuple[MessageQueue, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.removed or self.added)


def changes(held: Collection[MessageQueue], mine: Collection[MessageQueue]) -> Changes:
    """The changes from the queues held now to the queues that should be held."""
    return Changes(tuple(sorted(set(held) - set(mine))), tuple(sorted(set(mine) - set(held))))


async def route_of(session: Session, topic: str) -> TopicRouteData:
    """The route of a topic that is consumed, as last seen; looked up when there is none yet."""
    known = session.known_route(topic)
    return await session.follow(topic) if known is None else known


async def members_of(session: Session, group: str, topic: str) -> tuple[str, ...]:
    """The client ids of a group as one broker of the topic knows them. Raises when it cannot be asked, or knows none.

    Members announce themselves to all brokers of their topics, so any of them will do.
    """
    brokers = masters_of_route(await route_of(session, topic), topic)
    address = random.choice(brokers).address  # noqa: S311  spreads load, guards nothing
    reply = await session.invoke(address, request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest(group)))
    return decode_body(ConsumerIds, reply.body_bytes).consumer_id_list


async def allotted(session: Session, group: str, topic: str, strategy: AllocationStrategy) -> Sequence[MessageQueue]:
    """My share of a topic's queues. Raises an MQError when that cannot be told now: then nothing should change."""
    queues = readable_queues(topic, await route_of(session, topic))
    if not queues:
        raise NoRoute(topic, f"the topic {topic} has no queue that may be read at the moment")
    members = await members_of(session, group, topic)
    if session.client_id not in members:
        # The broker was restarted, or has not heard from us yet. Once it has, the list is right.
        await session.heartbeats.beat()
        members = await members_of(session, group, topic)
    return allocate(strategy, session.client_id, queues, members)


async def share(
    session: Session, group: str, topic: str, config: ConsumerConfig | LitePullConfig
) -> Sequence[MessageQueue]:
    """The queues of a topic that a member with this configuration should hold. Raises as `allotted` does."""
    if config.is_broadcasting:
        return readable_queues(topic, await route_of(session, topic))
    return await allotted(session, group, topic, config.allocation)


class RebalanceTimer:
    """When to look again: every period, at once when told, and sooner while something is missing.

    `rebalance` returns whether everything that should be held is held. Runs on one event loop; `soon` is called there.
    """

    def __init__(
        self, rebalance: Callable[[], Awaitable[bool]], clock: Clock, period_seconds: float = REBALANCE_SECONDS
    ) -> None:
        self._rebalance = rebalance
        self._clock = clock
        self._period_seconds = period_seconds
        self._due = asyncio.Event()

    def soon(self) -> None:
        """The group or its topics changed: do not wait for the next period."""
        self._due.set()

    async def run(self) -> None:
        """Rebalance for ever."""
        failures = 0
        while True:
            self._due.clear()
            try:
                is_balanced = await self._rebalance()
            except Exception:
                log.exception("rebalance failed")  # a defect; without another round the consumer would stand still
                is_balanced = False
            failures = 0 if is_balanced else failures + 1
            await sleep_or_set(self._clock, pause_seconds(failures, self._period_seconds), self._due)


def pause_seconds(failures: int, period_seconds: float) -> float:
    """How long to wait after so many rounds in a row that left something missing."""
    if not failures:
        return period_seconds
    return min(period_seconds, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16))
