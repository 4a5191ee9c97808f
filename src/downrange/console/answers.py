"""Puts the answers of brokers into the snapshot: joins the shares of several brokers, and notices what moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from downrange.client.admin.delayed import BrokerWaiting
from downrange.client.admin.groups import is_system_group
from downrange.client.admin.runtime import BrokerRuntime
from downrange.client.admin.transactions import OpenTransactions
from downrange.client.brokers import Broker
from downrange.clock import Clock
from downrange.console.schedule import Kind, Question
from downrange.console.snapshot import (
    BrokerState,
    GroupState,
    Growth,
    Member,
    Producer,
    QueueEnds,
    QueueProgress,
    Replicas,
    Snapshot,
    TopicState,
    Waiting,
    sum_known,
)
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from downrange.protocol.bodies.consumers import ConsumerRunningInfo
from downrange.protocol.bodies.controller import BrokerReplicasInfo
from downrange.protocol.bodies.groups import ConsumerConnection, ProducerTable
from downrange.protocol.bodies.statistics import ConsumeStats, QueueTimeSpan, TopicStats

# So long a rate of metrics, which is of the last seconds, counts more than one between two answers.
_METERED_MILLIS: Final = 60_000


class Answers:
    """The only writer of a snapshot's parts."""

    def __init__(self, snapshot: Snapshot, clock: Clock) -> None:
        self._snapshot = snapshot
        self._clock = clock

    def runtime(self, state: BrokerState, runtime: BrokerRuntime) -> None:
        state.runtime, state.at, state.error, state.is_silent = runtime, self._clock.now(), None, False

    def configs(
        self, state: BrokerState, topics: dict[str, TopicConfig], groups: dict[str, SubscriptionGroupConfig]
    ) -> None:
        """Take over what a broker serves; what no broker serves any more is forgotten."""
        state.topics = topics
        state.groups = {name: config for name, config in groups.items() if not is_system_group(name)}
        snapshot = self._snapshot
        for name in state.topics:
            if name not in snapshot.topics:
                snapshot.topics[name] = TopicState(name)
        for name in state.groups:
            if name not in snapshot.groups:
                snapshot.groups[name] = GroupState(name)
        served = {name for one in snapshot.masters for name in one.topics}
        known = {name for one in snapshot.masters for name in one.groups}
        for name in [name for name in snapshot.topics if name not in served]:
            del snapshot.topics[name]
        for name in [name for name in snapshot.groups if name not in known]:
            del snapshot.groups[name]

    def waiting(self, state: BrokerState, delayed: BrokerWaiting, half: OpenTransactions) -> None:
        now = self._clock.now()
        late = [now - one.due for one in delayed.soonest]
        oldest = [now - one.since for one in half.messages]
        state.waiting = Waiting(
            delayed.count,
            max((one for one in late if one > 0), default=None),
            len(half.messages),
            max(oldest, default=None),
        )

    def producers(self, state: BrokerState, tables: Iterable[ProducerTable]) -> None:
        state.producers = tuple(
            Producer(group, one.client_id, one.remote_ip, one.language or "", one.version, one.last_update_timestamp)
            for table in tables
            for group, entries in table.data.items()
            for one in entries
        )

    def progress(self, broker: Broker, group: str, stats: ConsumeStats) -> None:
        state = self._snapshot.groups.get(group)
        if state is None:
            return
        now = self._clock.now()
        for queue in [queue for queue in state.queues if queue.broker_name == broker.name]:
            if queue not in stats.offset_table:
                del state.queues[queue]
        for queue, offsets in stats.offset_table.items():
            before = state.queues.get(queue)
            after = QueueProgress(offsets.broker_offset, offsets.consumer_offset, offsets.last_timestamp, asked_at=now)
            if before is None or before.committed != after.committed or not before.behind:
                after.moved_at = now
            else:
                after.moved_at = before.moved_at
            if before is not None and after.behind:
                after.oldest = before.oldest
            state.queues[queue] = after
        state.consume_rates[broker.name] = stats.consume_tps
        state.at = now
        state.errors.pop(broker.name, None)
        if not state.behind:
            state.behind_since = None
        elif state.behind_since is None:
            state.behind_since = now

    def members(self, broker: Broker, group: str, connections: ConsumerConnection | None) -> None:
        state = self._snapshot.groups.get(group)
        if state is None:
            return
        state.members_at = self._clock.now()
        clients = () if connections is None else connections.connection_set
        present = {client.client_id for client in clients}
        for client in clients:
            member = state.members.setdefault(client.client_id, Member(client.client_id))
            member.address, member.language = client.client_addr, client.language or ""
            member.version = client.version
            member.brokers.add(broker.name)
        for client_id in [one for one in state.members if one not in present]:
            state.members[client_id].brokers.discard(broker.name)
            if not state.members[client_id].brokers:
                del state.members[client_id]
        if connections is not None:
            state.subscriptions = dict(connections.subscription_table)
            state.consume_type, state.message_model = connections.consume_type, connections.message_model

    def member(self, group: str, client_id: str, running: ConsumerRunningInfo) -> None:
        state = self._snapshot.groups.get(group)
        if state is None or client_id not in state.members:
            return
        member = state.members[client_id]
        member.queues = frozenset(running.mq_table) | frozenset(running.mq_pop_table or ())
        member.subscriptions = tuple(sorted(running.subscription_set, key=lambda one: one.topic))
        member.told_at, member.error = self._clock.now(), None

    def ends(self, broker: Broker, topic: str, ends: TopicStats) -> None:
        state = self._snapshot.topics.get(topic)
        if state is None:
            return
        now = self._clock.now()
        for queue in [queue for queue in state.queues if queue.broker_name == broker.name]:
            del state.queues[queue]
        for queue, reach in ends.offset_table.items():
            state.queues[queue] = QueueEnds(reach.min_offset, reach.max_offset, reach.last_update_timestamp)
        end, before = sum(reach.max_offset for reach in ends.offset_table.values()), state.growth.get(broker.name)
        rate = None if before is None else before.rate
        if before is not None and now > before.at:
            rate = max(0, end - before.end) * 1000 / (now - before.at)
        state.growth[broker.name] = Growth(now, end, rate)
        if now - state.metered_at > _METERED_MILLIS:
            state.rate = sum_known(one.rate for one in state.growth.values())
        state.at = now
        state.errors.pop(broker.name, None)

    def ages(self, group: str, spans: Iterable[QueueTimeSpan]) -> None:
        state = self._snapshot.groups.get(group)
        if state is None:
            return
        for span in spans:
            progress = state.queues.get(span.message_queue)
            if progress is not None and progress.behind:
                progress.oldest = max(0, span.delay_time)

    def failed(self, broker: Broker, state: BrokerState, question: Question, error: str) -> None:
        """Keep the old answer, and say why there is no new one."""
        match question.kind:
            case Kind.RUNTIME:
                state.error = error
            case Kind.TOPIC if question.name in self._snapshot.topics:
                self._snapshot.topics[question.name].errors[broker.name] = error
            case Kind.GROUP if question.name in self._snapshot.groups:
                self._snapshot.groups[question.name].errors[broker.name] = error
            case Kind.MEMBER if question.name in self._snapshot.groups:
                member = self._snapshot.groups[question.name].members.get(question.member)
                if member is not None:
                    member.error = error
            case _:
                pass


def sets_of(told: BrokerReplicasInfo) -> dict[str, Replicas]:
    """Broker sets as the leading controller knows them."""
    return {
        name: Replicas(
            info.master_address or "",
            tuple(one.broker_id for one in info.in_sync_replicas),
            tuple(one.broker_id for one in info.not_in_sync_replicas),
        )
        for name, info in told.replicas_info_table.items()
    }
