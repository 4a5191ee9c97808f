"""Consumer groups and producers: their connections, their progress and their configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from downrange.client.admin.chosen_brokers import chosen_brokers, tell_brokers
from downrange.client.admin.group_verdicts import GroupVerdicts, judge, subscriptions_of
from downrange.client.brokers import Broker
from downrange.client.consumer.rebalance import readable_queues
from downrange.client.errors import ClientNotFound, GroupNotFound, NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model.errors import MessageError, MQError
from downrange.model.message import MessageQueue
from downrange.model.text import Text
from downrange.model.topics import (
    BUILT_IN_GROUPS,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    GroupRetryPolicy,
    SubscriptionGroupConfig,
    check_group_name,
    retry_topic,
)
from downrange.protocol.bodies.body import BodyError, decode_body, encode_body
from downrange.protocol.bodies.consumers import (
    ConsumerRunningInfo,
    ConsumerStatus,
    GetConsumerRunningInfoRequest,
    GetConsumerStatusRequest,
)
from downrange.protocol.bodies.groups import (
    Connection,
    ConsumerConnection,
    ConsumerGroupRequest,
    DeleteSubscriptionGroupRequest,
    ProducerConnection,
    ProducerGroupRequest,
    SubscriptionGroupTable,
)
from downrange.protocol.bodies.pop import POP, PULL, MessageRequestMode, MessageRequestModes
from downrange.protocol.bodies.routes import TopicList
from downrange.protocol.bodies.statistics import ConsumeStats, GetConsumeStatsRequest
from downrange.protocol.codes import RequestCode, version_name
from downrange.protocol.command import request
from downrange.protocol.errors import ConsumerNotOnline, RequestCodeNotSupported
from downrange.settings import camel_case

AT_ONCE = 32
"""Groups looked at in parallel: many clusters have thousands."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One consumer group over all its brokers; figures miss the share of the brokers in `failed`."""

    group: str
    members: int
    version: str | None
    """The oldest release among the members."""
    consume_type: str | None
    message_model: str | None
    consume_tps: float
    behind: int
    failed: dict[Broker, MQError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupNames:
    """Groups by name, and the brokers that could not be asked for theirs.

    `configured` names the masters that have the configuration of a group. It misses a group that was deleted, whose
    retry topic is left.
    """

    names: tuple[str, ...]
    failed: dict[Broker, MQError]
    configured: dict[str, tuple[Broker, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """All groups, and each broker or group about which something could not be learnt."""

    groups: tuple[GroupSummary, ...]
    failed: dict[str, MQError]


class GroupAdmin:
    """Actions on groups. `broker` is a broker name or an address."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def names(self) -> GroupNames:
        """Every consumer group of users: a group that ever connected has a retry topic, any other a configuration."""
        reply = await self._session.ask_namesrv(request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        topics = decode_body(TopicList, reply.body_bytes).topic_list
        connected = {topic.removeprefix(RETRY_PREFIX) for topic in topics if topic.startswith(RETRY_PREFIX)}
        configured = await ask_each(await self._session.masters(), self.configs_of)
        brokers: dict[str, tuple[Broker, ...]] = {}
        for broker, configs in configured.done.items():
            for name in configs:
                brokers[name] = (*brokers.get(name, ()), broker)
        found = sorted(name for name in connected | brokers.keys() if not is_system_group(name))
        return GroupNames(tuple(found), configured.failed, brokers)

    async def configs(
        self, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, dict[str, SubscriptionGroupConfig]]:
        """The configuration of every group, by broker."""
        return await ask_each(await chosen_brokers(self._session, cluster, broker), self.configs_of)

    async def configs_of(self, broker: Broker) -> dict[str, SubscriptionGroupConfig]:
        reply = await self._session.ask(broker, request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))
        return decode_body(SubscriptionGroupTable, reply.body_bytes).subscription_group_table

    async def create(
        self, config: SubscriptionGroupConfig, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Create a group, or replace its configuration."""
        check_group_name(config.group_name)
        command = request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=encode_body(config))
        return await tell_brokers(self._session, command, cluster, broker)

    async def delete(
        self, group: str, cluster: str | None = None, broker: str | None = None, *, remove_offsets: bool = False
    ) -> PerServer[Broker, None]:
        header = DeleteSubscriptionGroupRequest(group_name=group, remove_offset=remove_offsets)
        return await tell_brokers(self._session, request(RequestCode.DELETE_SUBSCRIPTIONGROUP, header), cluster, broker)

    async def set_consume_mode(
        self,
        group: str,
        topic: str,
        mode: str,
        *,
        share: int = 0,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> PerServer[Broker, None]:
        """Let a group pull a topic or pop it, as far as its members leave that to brokers. [setConsumeMode]

        `mode` is PULL or POP; with POP each queue is shared by its owner and `share` others, by all when that is 0.
        """
        if mode not in (PULL, POP):
            raise MessageError(Text("the mode {mode} is neither PULL nor POP", mode=mode))
        wanted = MessageRequestMode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share)
        command = request(RequestCode.SET_MESSAGE_REQUEST_MODE, body=encode_body(wanted))
        return await tell_brokers(self._session, command, cluster, broker)

    async def consume_modes_of(self, broker: Broker) -> tuple[MessageRequestMode, ...]:
        """The modes that operators set on one broker; none on a broker before RocketMQ 5."""
        try:
            reply = await self._session.ask(broker, request(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE))
        except RequestCodeNotSupported:
            return ()
        modes = decode_body(MessageRequestModes, reply.body_bytes).message_request_mode_map
        return tuple(mode for groups in modes.values() for mode in groups.values())

    async def brokers_of(self, group: str) -> list[Broker]:
        """The masters that have the group's retry topic, or its configuration if it has never connected."""
        try:
            return await self._session.masters_of_topic(retry_topic(group))
        except NoRoute:
            configured = await ask_each(await self._session.masters(), self.configs_of)
            found = [broker for broker, configs in configured.done.items() if group in configs]
            if not found:
                configured.raise_if_none()
                raise GroupNotFound(
                    Text(
                        "no broker knows the consumer group {group}; `downrange group list` shows those there are",
                        group=group,
                    )
                ) from None
            return found

    async def progress(
        self, group: str, topic: str | None = None, brokers: Collection[Broker] | None = None
    ) -> PerServer[Broker, ConsumeStats]:
        """The progress of a group in each of its queues, or in the queues of one topic.

        `brokers` are those to ask, which spares looking for the brokers of the group.
        """
        asked = await self.brokers_of(group) if brokers is None else brokers
        return await ask_each(asked, lambda broker: self.progress_on(broker, group, topic))

    async def progress_on(self, broker: Broker, group: str, topic: str | None = None) -> ConsumeStats:
        command = request(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequest(group, topic))
        return decode_body(ConsumeStats, (await self._session.ask(broker, command)).body_bytes)

    async def connections(
        self, group: str, brokers: Collection[Broker] | None = None
    ) -> PerServer[Broker, ConsumerConnection | None]:
        """The members of a group as each broker sees them; None where no member is connected."""
        asked = await self.brokers_of(group) if brokers is None else brokers
        return await ask_each(asked, lambda broker: self.connections_on(broker, group))

    async def connections_on(self, broker: Broker, group: str) -> ConsumerConnection | None:
        command = request(RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(group))
        try:
            return decode_body(ConsumerConnection, (await self._session.ask(broker, command)).body_bytes)
        except ConsumerNotOnline:
            return None

    async def overview(self) -> GroupOverview:
        """Every group of users, with its members and how many messages it is behind."""
        gate = asyncio.Semaphore(AT_ONCE)
        listed = await self.names()

        async def one(group: str) -> GroupSummary:
            async with gate:
                # A broker that did not tell its groups would not answer for each of them either, but cost its time.
                summary = await self.summary(group, listed.configured.get(group))
                return replace(summary, failed={**listed.failed, **summary.failed})

        summaries = await ask_each(listed.names, one)
        failed = dict(summaries.failed)
        for errors in (listed.failed, *(summary.failed for summary in summaries.done.values())):
            failed.update({str(broker): error for broker, error in errors.items()})
        return GroupOverview(tuple(summaries.done.values()), failed)

    async def summary(self, group: str, brokers: Collection[Broker] | None = None) -> GroupSummary:
        asked = await self.brokers_of(group) if brokers is None else brokers
        stats, connections = await asyncio.gather(
            self.progress(group, brokers=asked), self.connections(group, brokers=asked)
        )
        online = [connection for connection in connections.done.values() if connection is not None]
        members = {member.client_id: member.version for connection in online for member in connection.connection_set}
        return GroupSummary(
            group=group,
            members=len(members),
            version=version_name(min(members.values())) if members else None,
            consume_type=online[0].consume_type if online else None,
            message_model=online[0].message_model if online else None,
            consume_tps=sum(answer.consume_tps for answer in stats.done.values()),
            behind=sum(queue.behind for answer in stats.done.values() for queue in answer.offset_table.values()),
            failed={**stats.failed, **connections.failed},
        )

    async def producers(self, group: str, topic: str) -> PerServer[Broker, ProducerConnection]:
        """The producers of a group connected to the brokers of a topic."""

        async def ask(broker: Broker) -> ProducerConnection:
            command = request(RequestCode.GET_PRODUCER_CONNECTION_LIST, ProducerGroupRequest(group))
            return decode_body(ProducerConnection, (await self._session.ask(broker, command)).body_bytes)

        return await ask_each(await self._session.masters_of_topic(topic), ask)

    async def running_info(self, group: str, client_id: str, *, with_stack: bool = False) -> ConsumerRunningInfo:
        """The running info of one member, asked through a broker it is connected to."""
        broker = await self._broker_with_member(group, client_id)
        return await self.running_info_from(broker, group, client_id, with_stack=with_stack)

    async def running_info_from(
        self, broker: Broker, group: str, client_id: str, *, with_stack: bool = False
    ) -> ConsumerRunningInfo:
        """The running info of one member, asked through a broker that is known to have it connected."""
        header = GetConsumerRunningInfoRequest(consumer_group=group, client_id=client_id, jstack_enable=with_stack)
        command = request(RequestCode.GET_CONSUMER_RUNNING_INFO, header)
        reply = await self._session.ask(broker, command, self._session.config.relay_timeout_seconds)
        return decode_body(ConsumerRunningInfo, reply.body_bytes)

    async def verdicts(self, members: Mapping[str, ConsumerRunningInfo]) -> GroupVerdicts:
        """Whether the members of a group, as they report themselves, subscribe alike and share all queues."""
        queues: list[MessageQueue] = []
        for topic in {topic for info in members.values() for topic in subscriptions_of(info)}:
            try:
                queues += readable_queues(topic, await self._session.look_up_route(topic))
            except NoRoute:  # the topic does not exist yet
                continue
        return judge(members, queues)

    async def offsets_in_members(
        self, group: str, topic: str, client_id: str | None = None
    ) -> PerServer[Broker, ConsumerStatus]:
        """The offsets that members hold in memory, ahead of the committed ones."""
        header = GetConsumerStatusRequest(topic=topic, group=group, client_addr=client_id)
        command = request(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, header)

        async def ask(broker: Broker) -> ConsumerStatus:
            reply = await self._session.ask(broker, command, self._session.config.relay_timeout_seconds)
            return decode_body(ConsumerStatus, reply.body_bytes)

        return await ask_each(await self._session.masters_of_topic(topic), ask)

    async def _broker_with_member(self, group: str, client_id: str) -> Broker:
        connections = await self.connections(group)
        for broker, connection in connections.done.items():
            if connection and any(member.client_id == client_id for member in connection.connection_set):
                return broker
        connections.raise_if_none()
        raise ClientNotFound(
            Text(
                "the group {group} has no member {client_id}; `downrange group connections` shows them",
                group=group,
                client_id=client_id,
            )
        )


def member_row(member: Connection) -> dict[str, str | None]:
    """One member of a group, or one producer, as operators look at it."""
    return {
        "clientId": member.client_id,
        "clientAddr": member.client_addr,
        "language": member.language,
        "version": version_name(member.version),
    }


def to_table(config: SubscriptionGroupConfig) -> dict[str, Any]:
    """The configuration under RocketMQ's names."""
    return {camel_case(name): value for name, value in asdict(config).items()}


def parse_retry_policy(text: str) -> GroupRetryPolicy | None:
    """The retry policy of a group as operators type it, in JSON; None for an empty text. Raises MessageError."""
    if not text:
        return None
    try:
        return decode_body(GroupRetryPolicy, text.encode())
    except BodyError as error:
        example = '{"type":"EXPONENTIAL","exponentialRetryPolicy":{"initial":5000,"max":60000,"multiplier":2}}'
        raise MessageError(
            Text("--retry-policy: {error}; expected for example {example}", error=error, example=example)
        ) from None


def is_system_group(group: str) -> bool:
    return group in BUILT_IN_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)
