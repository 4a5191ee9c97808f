"""Operator actions on topics."""

from __future__ import annotations

import pytest

from downrange.client.admin import Admin
from downrange.client.errors import ClusterNotFound, NoRoute
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.groups import GroupList
from downrange.protocol.bodies.statistics import BrokerStatsData, ConsumeStats, OffsetWrapper, StatsItem
from downrange.protocol.bodies.topics import TopicConfigTable
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import InternalError, TopicNotExist
from tests.unit.client.fake_cluster import GROUP, TOPIC, Answering, FakeCluster, genuine, mqadmin_sent, reply


async def test_topics_are_listed_by_cluster_or_all(cluster: FakeCluster, admin: Admin) -> None:
    names = await admin.topics.names()
    assert names == tuple(sorted(names))
    assert {TOPIC, f"%RETRY%{GROUP}"} <= set(names)
    assert TOPIC in await admin.topics.names("DefaultCluster")
    with pytest.raises(ClusterNotFound):
        await admin.topics.names("Elsewhere")
    assert await admin.topics.clusters(TOPIC) == ("DefaultCluster",)
    with pytest.raises(NoRoute):
        await admin.topics.clusters("nothere")


async def test_status_joins_all_brokers_and_keeps_the_one_that_fails(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.GET_TOPIC_STATS_INFO] = genuine("topic_admin", 202)
    cluster.brokers["broker-b"].answers[RequestCode.GET_TOPIC_STATS_INFO] = reply(17, "topic[orders] not exist")
    status = await admin.topics.status(TOPIC)
    ((broker, stats),) = status.done.items()
    assert broker.name == "broker-a"
    assert {queue.queue_id for queue in stats.offset_table} == {0, 1, 2, 3}
    assert [(one.name, type(error)) for one, error in status.failed.items()] == [("broker-b", TopicNotExist)]


async def test_creating_sends_what_the_genuine_tool_sends(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.UPDATE_AND_CREATE_TOPIC] = reply(remark="not set any response code")
    outcomes = await admin.topics.create(TopicConfig("gsTopicA", 4, 4), cluster="DefaultCluster")
    assert len(outcomes.done) == 2
    assert cluster.broker.fields(17) == [mqadmin_sent("topic_admin", 17)]


async def test_a_name_that_breaks_the_rules_is_not_even_sent(cluster: FakeCluster, admin: Admin) -> None:
    with pytest.raises(MessageError, match="illegal characters"):
        await admin.topics.create(TopicConfig("../../x"))
    assert cluster.broker.asked == []


async def test_an_ordered_topic_is_entered_in_the_name_servers(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.UPDATE_AND_CREATE_TOPIC] = reply()
    cluster.brokers["broker-b"].answers[RequestCode.UPDATE_AND_CREATE_TOPIC] = reply()
    await admin.topics.create(TopicConfig("ordered", 4, 4, order=True))
    assert await admin.namesrv.get_kv("ORDER_TOPIC_CONFIG", "ordered") == "broker-a:4;broker-b:4"
    await admin.topics.create(TopicConfig("ordered", 4, 2, order=True), broker=cluster.broker.address)
    assert await admin.namesrv.get_kv("ORDER_TOPIC_CONFIG", "ordered") == "broker-a:2"


def has(*topics: TopicConfig) -> Answering:
    return reply(body=TopicConfigTable(topic_config_table={topic.topic_name: topic for topic in topics}))


async def test_an_update_keeps_what_is_not_given(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers |= {17: reply(), 21: has(TopicConfig(TOPIC, 3, 5, 6, "MULTI_TAG", 1, order=True))}
    b.answers |= {17: reply(), 21: has(TopicConfig(TOPIC, 7, 9, 2))}
    changed = await admin.topics.update(TOPIC, perm=4)
    assert [(one.name, change.before.perm, change.after.perm) for one, change in changed.done.items()] == [
        ("broker-a", 6, 4),
        ("broker-b", 2, 4),
    ]
    (sent,) = a.fields(17)
    assert (sent["readQueueNums"], sent["writeQueueNums"], sent["perm"]) == ("3", "5", "4")
    assert (sent["topicFilterType"], sent["topicSysFlag"], sent["order"]) == ("MULTI_TAG", "1", "true")
    await admin.topics.update(TOPIC, write_queues=1, broker="broker-b")
    assert len(a.fields(17)) == 1
    sent = b.fields(17)[-1]
    assert (sent["readQueueNums"], sent["writeQueueNums"], sent["perm"]) == ("7", "1", "2")
    with pytest.raises(NoRoute, match="not on broker-z"):
        await admin.topics.update(TOPIC, perm=4, broker="broker-z")


async def test_a_topic_its_broker_no_longer_has_is_not_brought_back(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers |= {17: reply(), 21: has()}
    b.answers |= {17: reply(), 21: has(TopicConfig(TOPIC, 7, 9, 2))}
    changed = await admin.topics.update(TOPIC, perm=4)
    assert [one.name for one in changed.done] == ["broker-b"]
    assert [(one.name, type(error)) for one, error in changed.failed.items()] == [("broker-a", NoRoute)]
    assert a.fields(17) == []


async def test_deleting_tells_brokers_first_and_then_the_name_server(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.DELETE_TOPIC_IN_BROKER] = reply()
    deletion = await admin.topics.delete(TOPIC, "DefaultCluster")
    assert (len(deletion.brokers.done), len(deletion.namesrvs.done)) == (2, 1)
    with pytest.raises(NoRoute):
        await admin.topics.route(TOPIC)


async def test_a_broker_that_keeps_a_topic_keeps_its_route(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.DELETE_TOPIC_IN_BROKER] = reply()
    cluster.brokers["broker-b"].answers[RequestCode.DELETE_TOPIC_IN_BROKER] = reply(1, "system topic")
    deletion = await admin.topics.delete(TOPIC)
    assert [(one.name, type(error)) for one, error in deletion.brokers.failed.items()] == [("broker-b", InternalError)]
    assert deletion.namesrvs.done == {}
    assert await admin.topics.route(TOPIC)


async def test_traffic_adds_up_all_brokers(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.QUERY_TOPIC_CONSUME_BY_WHO] = reply(body=GroupList((GROUP,)))
        broker.answers[RequestCode.GET_CONSUME_STATS] = reply(
            body=ConsumeStats(
                offset_table={
                    MessageQueue(TOPIC, broker.name, 0): OffsetWrapper(broker_offset=10, consumer_offset=7),
                    MessageQueue(TOPIC, broker.name, 1): OffsetWrapper(broker_offset=5, consumer_offset=5),
                }
            )
        )
        broker.answers[RequestCode.VIEW_BROKER_STATS_DATA] = counters
    report = await admin.topics.traffic(TOPIC)
    (row,) = report.rows
    assert (row.group, row.accumulation, row.in_tps, row.in_24_hours) == (GROUP, 6, 3.0, 20)
    assert (row.out_tps, row.out_24_hours) == (0.0, 0)  # a counter that does not exist yet counts nothing
    assert report.failed == {}
    cluster.brokers["broker-b"].answers[RequestCode.VIEW_BROKER_STATS_DATA] = reply(1, "out of order")
    assert [broker.name for broker in (await admin.topics.traffic(TOPIC)).failed] == ["broker-b"]


def counters(command: Command) -> Command:
    """A topic that gets messages and a group that has taken none yet."""
    if command.ext_fields["statsName"] == "TOPIC_PUT_NUMS":
        assert command.ext_fields["statsKey"] == TOPIC
        return reply(body=BrokerStatsData(stats_minute=StatsItem(sum=10, tps=1.5)))(command)
    assert command.ext_fields["statsKey"] == f"{TOPIC}@{GROUP}"
    return reply(1, "The stats <GROUP_GET_NUMS> not exist")(command)


async def test_a_topic_nobody_reads_has_one_row(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.QUERY_TOPIC_CONSUME_BY_WHO] = reply(body=GroupList())
        broker.answers[RequestCode.VIEW_BROKER_STATS_DATA] = genuine("cluster_admin", 315)
    (row,) = (await admin.topics.traffic(TOPIC)).rows
    assert (row.group, row.accumulation) == (None, None)
    assert row.in_24_hours == 4
