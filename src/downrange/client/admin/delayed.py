"""Delayed messages that wait: by delay level in SCHEDULE_TOPIC_XXXX, and those of the timer (5.x)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from downrange.client.admin.cluster import properties_table
from downrange.client.admin.queue_reading import reach, read_between
from downrange.client.brokers import Broker
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model import properties as names
from downrange.model.delay_levels import DEFAULT_DELAY_LEVELS, parse_delay_levels
from downrange.model.message import MessageQueue
from downrange.model.properties import find_property
from downrange.model.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.offsets import DelayOffsets
from downrange.protocol.bodies.timer import TimerMetricsTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import BrokerError

MAX_TIMED_LOOKED_AT = 20_000
"""Messages of a broker's timer topic that are read to find those that wait: its newest."""


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """One message that waits: for which topic, until when, and by which level, None for a timer message."""

    message: ReceivedMessage
    topic: str
    due: int
    level: int | None


@dataclass(frozen=True, slots=True)
class LevelWaiting:
    """How many messages of one delay level wait on a broker."""

    level: int
    delay_millis: int
    count: int


@dataclass(frozen=True, slots=True)
class BrokerWaiting:
    """What waits on one broker: by level; timer messages by topic, None if the broker has no timer; the soonest due."""

    levels: tuple[LevelWaiting, ...]
    timed: Mapping[str, int] | None
    soonest: tuple[DelayedMessage, ...] = field(default=())

    @property
    def count(self) -> int:
        return sum(level.count for level in self.levels) + sum((self.timed or {}).values())


def due_time(properties_text: str, store_timestamp: int, delays: tuple[int, ...]) -> int | None:
    """When a message of a waiting room is due, by its timer or by its delay level; None: it has neither."""
    timed = find_property(properties_text, names.TIMER_OUT_MS) or ""
    if timed.isdecimal():
        return int(timed)
    level = find_property(properties_text, names.DELAY) or ""
    if not level.isdecimal() or not int(level):
        return None
    return store_timestamp + delays[min(int(level), len(delays)) - 1]


class DelayedAdmin:
    """Looks at delayed messages."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def waiting(
        self, topic: str | None = None, *, limit: int = 100, cluster: str | None = None
    ) -> PerServer[Broker, BrokerWaiting]:
        """What waits on every master, with at most `limit` messages a broker, those due soonest.

        With a `topic` the messages are of this topic alone; brokers count levels over all topics.
        """

        async def ask(broker: Broker) -> BrokerWaiting:
            return await self.waiting_on(broker, topic, limit)

        return await ask_each(await self._session.masters(cluster), ask)

    async def waiting_on(self, broker: Broker, topic: str | None = None, limit: int = 100) -> BrokerWaiting:
        delays = await self.delays_of(broker)
        reply = await self._session.ask(broker, request(RequestCode.GET_ALL_DELAY_OFFSET))
        delivered = decode_body(DelayOffsets, reply.body_bytes).offset_table
        levels = []
        found: list[DelayedMessage] = []
        for queue, offsets in sorted((await reach(self._session, broker, SCHEDULE_TOPIC)).items()):
            level = queue.queue_id + 1
            first = max(offsets.min_offset, delivered.get(level, 0))
            if first < offsets.max_offset and level <= len(delays):
                levels.append(LevelWaiting(level, delays[level - 1], offsets.max_offset - first))
                found += await self._of_level(broker, queue, (first, offsets.max_offset), delays, topic, limit)
        timed = await self.timed_on(broker)
        if timed:
            found += await self._of_timer(broker, delays, topic)
        soonest = heapq.nsmallest(limit, found, key=lambda one: one.due)
        return BrokerWaiting(tuple(levels), timed, tuple(soonest))

    async def delays_of(self, broker: Broker) -> tuple[int, ...]:
        """The delay of each level on a broker, in milliseconds; RocketMQ's own where the broker may not say."""
        try:
            reply = await self._session.ask(broker, request(RequestCode.GET_BROKER_CONFIG))
            return parse_delay_levels(properties_table(reply.body_bytes).get("messageDelayLevel", DEFAULT_DELAY_LEVELS))
        except BrokerError:
            return parse_delay_levels(DEFAULT_DELAY_LEVELS)

    async def timed_on(self, broker: Broker) -> dict[str, int] | None:
        """How many timer messages wait on a broker, by topic; None for a broker without a timer (4.x)."""
        try:
            reply = await self._session.ask(broker, request(RequestCode.GET_TIMER_METRICS))
        except BrokerError:
            return None
        table = decode_body(TimerMetricsTable, reply.body_bytes).timing_count
        return {topic: waiting.count for topic, waiting in sorted(table.items()) if waiting.count > 0}

    async def _of_level(
        self,
        broker: Broker,
        queue: MessageQueue,
        between: tuple[int, int],
        delays: tuple[int, ...],
        topic: str | None,
        limit: int,
    ) -> list[DelayedMessage]:
        """The first messages of a level, which are due in the order of their arrival."""
        found: list[DelayedMessage] = []
        async for message in read_between(self._session, broker, queue, *between):
            one = delayed_message(message, delays)
            if one is not None and topic in (None, one.topic):
                found.append(one)
                if len(found) == limit:
                    break
        return found

    async def _of_timer(self, broker: Broker, delays: tuple[int, ...], topic: str | None) -> list[DelayedMessage]:
        """The timer messages that are not due yet and were not recalled, of the newest in the timer topic."""
        queue = MessageQueue(TIMER_TOPIC, broker.name, 0)
        offsets = (await reach(self._session, broker, TIMER_TOPIC)).get(queue)
        if offsets is None:
            return []
        now = self._session.clock.now()
        found: dict[str, DelayedMessage] = {}
        recalled: set[str] = set()
        begin = max(offsets.min_offset, offsets.max_offset - MAX_TIMED_LOOKED_AT)
        async for message in read_between(self._session, broker, queue, begin, offsets.max_offset):
            deletes = find_property(message.properties_text, names.TIMER_DEL_UNIQKEY)
            if deletes is not None:
                recalled.add(deletes.rpartition("+")[2])  # `topic+id`, of older 5.x the id alone
                continue
            one = delayed_message(message, delays)
            if one is not None and one.due > now and topic in (None, one.topic):
                found[message.message_id] = one  # one that waits longer than the wheel reaches is stored again
        return [one for message_id, one in found.items() if message_id not in recalled]


def delayed_message(message: ReceivedMessage, delays: tuple[int, ...]) -> DelayedMessage | None:
    """A message of a waiting room with its real topic; None for one that is no delayed message."""
    topic = find_property(message.properties_text, names.REAL_TOPIC)
    due = due_time(message.properties_text, message.store_timestamp, delays)
    if topic is None or due is None:
        return None
    is_timed = find_property(message.properties_text, names.TIMER_OUT_MS) is not None
    level = None if is_timed else int(find_property(message.properties_text, names.DELAY) or 0)
    return DelayedMessage(message, topic, due, level)
