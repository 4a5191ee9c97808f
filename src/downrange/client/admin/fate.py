"""The fate of one message: where it is, and for each group that reads its topic why it has or has not consumed it.

Everything is asked with requests that 4.9 and 5.x brokers know; `verdicts.py` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from downrange.client.admin.delayed import DelayedAdmin, due_time
from downrange.client.admin.groups import GroupAdmin
from downrange.client.admin.located import Located
from downrange.client.admin.verdicts import (
    GroupEvidence,
    Member,
    NotVisible,
    Retry,
    Verdict,
    verdict,
)
from downrange.client.brokers import Broker
from downrange.client.errors import NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.client.trace_reader import MessageTrace
from downrange.model import properties as names
from downrange.model.errors import MQError
from downrange.model.message import MessageQueue, StoredMessage
from downrange.model.properties import find_property
from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import compile_sql
from downrange.model.subscription import Subscription
from downrange.model.topics import SCHEDULE_TOPIC, dlq_topic, pop_retry_topic, retry_topic
from downrange.protocol.bodies.groups import ConsumerConnection, MessageModel
from downrange.protocol.bodies.statistics import ConsumeStats

AT_ONCE = 8
MOST_MEMBERS = 64
"""Members that are asked which of them has the queue of the message."""


@dataclass(frozen=True, slots=True)
class MessageFate:
    """One message, its place, and the verdict for each group, sorted by name."""

    message: StoredMessage
    queue: MessageQueue
    hidden: NotVisible | None
    verdicts: tuple[Verdict, ...]
    trace: MessageTrace | None = None
    failed: dict[Broker, MQError] = field(default_factory=dict)


def matches(subscription: Subscription, properties_text: str) -> bool:
    """Whether a subscription wants a message; one that cannot be read wants every message, as brokers have it."""
    if subscription.class_filter_mode:
        return True
    if subscription.is_tag_type:
        return not subscription.tags or find_property(properties_text, names.TAGS) in subscription.tags
    try:
        expression = compile_sql(subscription.expression)
    except SqlError:
        return True
    return expression.matches(partial(find_property, properties_text))


def last_retry(
    waiting: Iterable[StoredMessage], arrived: Iterable[StoredMessage], delays: tuple[int, ...]
) -> Retry | None:
    """The latest copy of a message for one group: of those that wait until they are due, and those that arrived."""
    due = max(waiting, key=lambda one: one.store_timestamp, default=None)
    there = max(arrived, key=lambda one: one.store_timestamp, default=None)
    if due is not None and (there is None or there.store_timestamp < due.store_timestamp):
        when = due_time(due.properties_text, due.store_timestamp, delays)
        return Retry(due.reconsume_times, due.store_timestamp, when)
    return None if there is None else Retry(there.reconsume_times, there.store_timestamp)


class FateFinder:
    """Collects the evidence about one message. `copies` finds the messages of a topic with a unique id, by broker."""

    def __init__(self, session: Session, located: Located, trace: MessageTrace | None) -> None:
        self._session = session
        self._groups = GroupAdmin(session)
        self._located = located
        self._trace = trace
        self._delays: tuple[int, ...] = ()
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def find(self, groups: PerServer[Broker, tuple[str, ...]]) -> MessageFate:
        place = self._located
        wanted = sorted({group for found in groups.done.values() for group in found})
        self._delays = await DelayedAdmin(self._session).delays_of(place.broker)
        scheduled = [] if place.hidden else await self._copies(SCHEDULE_TOPIC)

        async def one(group: str) -> Verdict:
            async with self._gate:
                return verdict(await self._evidence(group, scheduled), place.hidden)

        verdicts = await asyncio.gather(*map(one, wanted))
        return MessageFate(place.message, place.queue, place.hidden, tuple(verdicts), self._trace, groups.failed)

    async def _evidence(self, group: str, scheduled: list[StoredMessage]) -> GroupEvidence:
        place = self._located
        evidence = GroupEvidence(group, place.queue, place.message.queue_offset, self._session.clock.now())
        if place.hidden is not None:
            return evidence
        stats, connections = await asyncio.gather(
            self._groups.progress(group, brokers=[place.broker]),
            self._groups.connections(group, brokers=[place.broker]),
        )
        unanswered = {broker.name: str(error) for broker, error in {**stats.failed, **connections.failed}.items()}
        try:
            dead = await self._copies(dlq_topic(group))
            arrived = await self._copies(retry_topic(group), *pop_topics(group, place.queue.topic))
        except MQError as error:
            dead, arrived = [], []
            unanswered[place.queue.broker_name] = str(error)
        progress = next(iter(stats.done.values()), ConsumeStats())
        offsets = progress.offset_table.get(place.queue)
        busy = sum(1 for one in progress.offset_table.values() if one.behind > 0)  # a broker tells one rate for all
        waiting = [
            one for one in scheduled if find_property(one.properties_text, names.REAL_TOPIC) == retry_topic(group)
        ]
        evidence = replace(
            evidence,
            dead_since=max((one.store_timestamp for one in dead), default=None),
            retry=_with_progress(last_retry(waiting, arrived, self._delays), arrived, place.queue, progress),
            unanswered=unanswered,
            deliveries=tuple(self._trace.groups.get(group, ())) if self._trace is not None else (),
            committed=None if offsets is None else offsets.consumer_offset,
            messages_per_second=progress.consume_tps / max(1, busy),
        )
        for connection in connections.done.values():
            evidence = await self._with_members(evidence, connection)
        return evidence

    async def _with_members(self, evidence: GroupEvidence, connection: ConsumerConnection | None) -> GroupEvidence:
        if connection is None or not connection.connection_set:
            return replace(evidence, members=0)
        subscription = connection.subscription_table.get(evidence.queue.topic)
        evidence = replace(
            evidence,
            members=len(connection.connection_set),
            is_broadcasting=connection.message_model == MessageModel.BROADCASTING,
            subscription=subscription,
            matches=subscription is None or matches(subscription, self._located.message.properties_text),
        )
        is_behind = evidence.committed is None or evidence.committed <= evidence.queue_offset
        return await self._with_owner(evidence, connection) if is_behind and evidence.matches else evidence

    async def _with_owner(self, evidence: GroupEvidence, connection: ConsumerConnection) -> GroupEvidence:
        """Ask the members which of them has the queue; not known when one of them does not say."""
        clients = [member.client_id for member in connection.connection_set][:MOST_MEMBERS]
        infos = await ask_each(
            clients, lambda client: self._groups.running_info_from(self._located.broker, evidence.group, client)
        )
        for client_id, info in infos.done.items():
            held = info.mq_table.get(evidence.queue)
            if held is not None and not held.dropped:
                started = str(info.properties.get("PROP_CONSUMER_START_TIMESTAMP", ""))
                since = max(
                    held.last_consume_timestamp,
                    int(started) if started.isdecimal() else 0,
                    self._located.message.store_timestamp,
                )
                return replace(evidence, owner=Member(client_id, since), owner_is_known=True)
        pops = any(info.mq_pop_table for info in infos.done.values())
        says_all = not infos.failed and len(clients) == len(connection.connection_set)
        return replace(evidence, owner_is_known=says_all and not pops)

    async def _copies(self, *topics: str) -> list[StoredMessage]:
        """The copies of the message in topics, where they exist; raises what the broker of the message answers."""
        found: list[StoredMessage] = []
        for topic in topics:
            try:
                by_broker = await self._located.copies(topic)
            except NoRoute:
                continue
            for broker, error in by_broker.failed.items():
                if broker.name == self._located.queue.broker_name:
                    raise error
            found += [one for messages in by_broker.done.values() for one in messages]
        return found


def pop_topics(group: str, topic: str) -> tuple[str, ...]:
    return tuple(pop_retry_topic(group, topic, version=version) for version in (1, 2))


def _with_progress(
    retry: Retry | None, arrived: list[StoredMessage], place: MessageQueue, progress: ConsumeStats
) -> Retry | None:
    """The retry, and whether the group has committed beyond it in its retry topic."""
    if retry is None or retry.due is not None:
        return retry
    copy = max(arrived, key=lambda one: one.store_timestamp)
    offsets = progress.offset_table.get(MessageQueue(copy.topic, place.broker_name, copy.queue_id))
    return replace(retry, is_committed=offsets is not None and offsets.consumer_offset > copy.queue_offset)
