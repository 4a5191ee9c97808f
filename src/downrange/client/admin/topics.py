"""Topics: their routes, offsets and rates, and how they are created, changed and deleted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from downrange.client.admin.chosen_brokers import chosen_brokers
from downrange.client.admin.namesrv import NamesrvAdmin
from downrange.client.brokers import Broker
from downrange.client.errors import NoRoute
from downrange.client.per_server import PerServer, ask_each
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.text import Text
from downrange.model.topics import AUTO_CREATE_TOPIC, DLQ_PREFIX, RETRY_PREFIX, TopicConfig, check_topic_name
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.groups import GroupList
from downrange.protocol.bodies.routes import TopicList, TopicRouteData, TopicsByClusterRequest
from downrange.protocol.bodies.statistics import (
    BrokerStatsData,
    ConsumeStats,
    GetConsumeStatsRequest,
    TopicStats,
    ViewBrokerStatsRequest,
)
from downrange.protocol.bodies.topics import (
    CreateTopicRequest,
    DeleteTopicInNamesrvRequest,
    TopicConfigTable,
    TopicRequest,
)
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.protocol.errors import InternalError


@dataclass(frozen=True, slots=True)
class TopicChange:
    """The configuration of a topic on one broker, before a change and after it."""

    before: TopicConfig
    after: TopicConfig


@dataclass(frozen=True, slots=True)
class TopicDeletion:
    """Where a topic was deleted. Name servers are told only when every broker has let it go."""

    brokers: PerServer[Broker, None]
    namesrvs: PerServer[str, None]


@dataclass(frozen=True, slots=True)
class TopicTraffic:
    """A topic and one group that reads it, over all brokers; without a group when there is none."""

    topic: str
    group: str | None
    accumulation: int | None
    in_tps: float
    out_tps: float | None
    in_24_hours: int
    out_24_hours: int | None


@dataclass(frozen=True, slots=True)
class TopicTrafficReport:
    """Traffic of one topic, and the brokers that could not be asked: their share is missing in the figures."""

    rows: tuple[TopicTraffic, ...]
    failed: dict[Broker, MQError] = field(default_factory=dict)


class TopicAdmin:
    """Actions on topics. `broker` is a broker name or an address."""

    def __init__(self, session: Session, namesrv: NamesrvAdmin) -> None:
        self._session = session
        self._namesrv = namesrv

    async def names(self, cluster: str | None = None) -> tuple[str, ...]:
        """Every topic the name server knows, retry and dead-letter topics included."""
        if cluster is None:
            command = request(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        else:
            await self._session.brokers(cluster)  # an unknown cluster would look like an empty one
            command = request(RequestCode.GET_TOPICS_BY_CLUSTER, TopicsByClusterRequest(cluster))
        reply = await self._session.ask_namesrv(command)
        return tuple(sorted(decode_body(TopicList, reply.body_bytes).topic_list))

    async def route(self, topic: str) -> TopicRouteData:
        return await self._session.look_up_route(topic)

    async def clusters(self, topic: str) -> tuple[str, ...]:
        """The clusters that serve a topic."""
        return tuple(sorted({data.cluster for data in (await self.route(topic)).broker_datas}))

    async def status(self, topic: str) -> PerServer[Broker, TopicStats]:
        """The reach of every queue, by broker."""

        return await ask_each(await self._session.masters_of_topic(topic), lambda broker: self.status_on(broker, topic))

    async def status_on(self, broker: Broker, topic: str) -> TopicStats:
        reply = await self._session.ask(broker, request(RequestCode.GET_TOPIC_STATS_INFO, TopicRequest(topic)))
        return decode_body(TopicStats, reply.body_bytes)

    async def groups(self, topic: str) -> PerServer[Broker, tuple[str, ...]]:
        """The groups that consume a topic, by broker: groups that are online or have committed offsets."""

        async def ask(broker: Broker) -> tuple[str, ...]:
            reply = await self._session.ask(
                broker, request(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, TopicRequest(topic))
            )
            return decode_body(GroupList, reply.body_bytes).group_list

        return await ask_each(await self._session.masters_of_topic(topic), ask)

    async def create(
        self, config: TopicConfig, cluster: str | None = None, broker: str | None = None
    ) -> PerServer[Broker, None]:
        """Create a topic, or replace its configuration. An ordered topic is also entered in the name servers."""
        check_topic_name(config.topic_name)

        async def tell(one: Broker) -> None:
            await self._put(one, config)

        outcomes = await ask_each(await chosen_brokers(self._session, cluster, broker), tell)
        if config.order and outcomes.done:
            names = {one.address: one.name for one in await self._session.brokers()}
            queues = ";".join(f"{names[one.address]}:{config.write_queue_nums}" for one in outcomes.done)
            entered = await self._namesrv.update_order_conf(config.topic_name, queues)
            not_entered = {Broker(address): error for address, error in entered.failed.items()}
            return PerServer(outcomes.done, {**outcomes.failed, **not_entered})
        return outcomes

    async def configs_of(self, topic: str) -> PerServer[Broker, TopicConfig]:
        """The configuration of a topic on each broker that serves it."""

        async def ask(broker: Broker) -> TopicConfig:
            config = (await self.configs_on(broker)).get(topic)
            if config is None:
                raise NoRoute(topic, Text("the broker no longer has the topic {topic}", topic=topic))
            return config

        return await ask_each(await self._session.masters_of_topic(topic), ask)

    async def update(
        self,
        topic: str,
        *,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> PerServer[Broker, TopicChange]:
        """Change the given settings of an existing topic and keep the others, on each broker that serves it."""
        serving = await self._session.masters_of_topic(topic)
        if broker is not None:
            serving = [one for one in serving if broker in (one.name, one.address)]
        elif cluster is not None:
            serving = [one for one in serving if one.cluster == cluster]
        if not serving:
            raise NoRoute(
                topic,
                Text(
                    "the topic {topic} is not on {place}; create it there first", topic=topic, place=broker or cluster
                ),
            )

        async def tell(one: Broker) -> TopicChange:
            # From the broker itself: a route may be older than the last change, and tells less.
            before = (await self.configs_on(one)).get(topic)
            if before is None:
                raise NoRoute(topic, Text("the broker no longer has the topic {topic}", topic=topic))
            after = replace(
                before,
                read_queue_nums=before.read_queue_nums if read_queues is None else read_queues,
                write_queue_nums=before.write_queue_nums if write_queues is None else write_queues,
                perm=before.perm if perm is None else perm,
            )
            await self._put(one, after)
            return TopicChange(before, after)

        return await ask_each(serving, tell)

    async def delete(self, topic: str, cluster: str | None = None) -> TopicDeletion:
        """Delete a topic from the brokers of a cluster, or from all that serve it, then from the name servers."""
        if cluster is None:
            masters = await self._session.masters_of_topic(topic)
        else:
            masters = await self._session.masters(cluster)

        async def tell(broker: Broker) -> None:
            await self._session.ask(broker, request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic)))

        brokers = await ask_each(masters, tell)
        if brokers.failed:
            # A broker that still has the topic would register it again; the route stays, so that this can be repeated.
            return TopicDeletion(brokers, PerServer())
        header = DeleteTopicInNamesrvRequest(topic, cluster)
        return TopicDeletion(
            brokers, await self._namesrv.tell_every(request(RequestCode.DELETE_TOPIC_IN_NAMESRV, header))
        )

    async def traffic(self, topic: str) -> TopicTrafficReport:
        """The rates of a topic: of sending to it, and of each group's reading."""
        consumers = await self.groups(topic)
        masters = list(consumers.done)
        put = await ask_each(masters, partial(self._counter, "TOPIC_PUT_NUMS", topic))
        failed: dict[Broker, MQError] = {**consumers.failed, **put.failed}
        in_tps = sum(data.stats_minute.tps for data in put.done.values())
        in_24_hours = sum(day_sum(data) for data in put.done.values())
        rows = []
        for group in sorted({name for names in consumers.done.values() for name in names}):
            got = await ask_each(masters, partial(self._counter, "GROUP_GET_NUMS", f"{topic}@{group}"))
            stats = await ask_each(masters, partial(self._consume_stats, group, topic))
            failed |= {**got.failed, **stats.failed}
            rows.append(
                TopicTraffic(
                    topic=topic,
                    group=group,
                    accumulation=sum(
                        queue.behind for answer in stats.done.values() for queue in answer.offset_table.values()
                    ),
                    in_tps=in_tps,
                    out_tps=sum(data.stats_minute.tps for data in got.done.values()),
                    in_24_hours=in_24_hours,
                    out_24_hours=sum(day_sum(data) for data in got.done.values()),
                )
            )
        return TopicTrafficReport(
            tuple(rows) or (TopicTraffic(topic, None, None, in_tps, None, in_24_hours, None),), failed
        )

    async def _counter(self, name: str, key: str, broker: Broker) -> BrokerStatsData:
        try:
            reply = await self._session.ask(
                broker, request(RequestCode.VIEW_BROKER_STATS_DATA, ViewBrokerStatsRequest(name, key))
            )
        except InternalError as error:
            if "not exist" in error.remark:  # a counter comes into being with the first message it counts
                return BrokerStatsData()
            raise
        return decode_body(BrokerStatsData, reply.body_bytes)

    async def _consume_stats(self, group: str, topic: str, broker: Broker) -> ConsumeStats:
        reply = await self._session.ask(
            broker, request(RequestCode.GET_CONSUME_STATS, GetConsumeStatsRequest(group, topic))
        )
        return decode_body(ConsumeStats, reply.body_bytes)

    async def configs_on(self, broker: Broker) -> dict[str, TopicConfig]:
        reply = await self._session.ask(broker, request(RequestCode.GET_ALL_TOPIC_CONFIG))
        return decode_body(TopicConfigTable, reply.body_bytes).topic_config_table

    async def _put(self, broker: Broker, config: TopicConfig) -> None:
        attributes = ",".join(f"+{name}={value}" for name, value in (config.attributes or {}).items())
        header = CreateTopicRequest(
            topic=config.topic_name,
            default_topic=AUTO_CREATE_TOPIC,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm,
            topic_filter_type=config.topic_filter_type,
            topic_sys_flag=config.topic_sys_flag,
            order=config.order,
            attributes=attributes or None,
        )
        await self._session.ask(broker, request(RequestCode.UPDATE_AND_CREATE_TOPIC, header))


def day_sum(data: BrokerStatsData) -> int:
    """Messages of the last 24 hours; a young counter has only its hour or minute filled."""
    return data.stats_day.sum or data.stats_hour.sum or data.stats_minute.sum


def is_user_topic(topic: str) -> bool:
    """A topic an application sends to: no retry or dead-letter topic."""
    return not topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
