"""Operator actions on consumer groups and their members."""

from __future__ import annotations

import pytest

from downrange.client.admin import Admin
from downrange.client.errors import ClientNotFound, GroupNotFound
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.groups import Connection, ConsumerConnection, SubscriptionGroupTable
from downrange.protocol.bodies.statistics import ConsumeStats, OffsetWrapper
from downrange.protocol.codes import RequestCode
from downrange.protocol.errors import ConsumeMessageTimeout, InternalError
from tests.unit.client.fake_cluster import GROUP, TOPIC, FakeCluster, genuine, mqadmin_sent, reply

NOT_ONLINE = reply(206, "the consumer group[billing] not online")


def members(*ids: str) -> ConsumerConnection:
    return ConsumerConnection(
        connection_set=tuple(Connection(client_id=one, client_addr="10.0.0.9:1", version=409) for one in ids),
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
    )


def behind(broker: str, by: int) -> ConsumeStats:
    queue = MessageQueue(TOPIC, broker, 0)
    return ConsumeStats(offset_table={queue: OffsetWrapper(broker_offset=10 + by, consumer_offset=10)}, consume_tps=1.5)


async def test_progress_is_asked_of_every_broker_with_the_retry_topic(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.GET_CONSUME_STATS] = genuine("admin_consumer", 208)
    stats = await admin.groups.progress(GROUP)
    ((broker, found),) = stats.done.items()
    assert broker.name == "broker-a"
    assert {queue.topic: offsets.behind for queue, offsets in found.offset_table.items() if queue.queue_id == 0} == {
        "gsTopicOrder": 1
    }
    assert [one.name for one in stats.failed] == ["broker-b"]
    assert cluster.broker.fields(208) == [{"consumerGroup": GROUP}]
    await admin.groups.progress(GROUP, TOPIC)
    assert cluster.broker.fields(208)[-1] == {"consumerGroup": GROUP, "topic": TOPIC}


async def test_a_group_that_never_connected_is_found_by_its_configuration(cluster: FakeCluster, admin: Admin) -> None:
    table = SubscriptionGroupTable(subscription_group_table={"fresh": SubscriptionGroupConfig("fresh")})
    cluster.brokers["broker-a"].answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(
        body=SubscriptionGroupTable()
    )
    cluster.brokers["broker-b"].answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(body=table)
    assert [broker.name for broker in await admin.groups.brokers_of("fresh")] == ["broker-b"]
    with pytest.raises(GroupNotFound, match="typo"):
        await admin.groups.progress("typo")


async def test_where_nobody_is_connected_is_no_error(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = genuine("admin_consumer", 203)
    cluster.brokers["broker-b"].answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = NOT_ONLINE
    connections = await admin.groups.connections(GROUP)
    assert connections.failed == {}
    online, offline = connections.done.values()
    assert offline is None
    assert online is not None
    assert [member.client_id for member in online.connection_set] == ["10.0.0.9@c54557"]
    assert online.subscription_table["gsTopicOrder"].expression == "*"


async def test_the_overview_counts_members_once_and_adds_up_what_is_behind(cluster: FakeCluster, admin: Admin) -> None:
    configs = {name: SubscriptionGroupConfig(name) for name in ("fresh", "TOOLS_CONSUMER", "CID_RMQ_SYS_X")}
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(
            body=SubscriptionGroupTable(subscription_group_table=configs)
        )
        broker.answers[RequestCode.GET_CONSUME_STATS] = reply(body=behind(broker.name, 3))
        broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = reply(body=members("one", "two"))
    overview = await admin.groups.overview()
    assert [one.group for one in overview.groups] == [GROUP, "fresh"]
    billing = overview.groups[0]
    assert (billing.members, billing.behind, billing.consume_tps, billing.version) == (2, 6, 3.0, "V4_9_8")
    assert overview.failed == {}
    cluster.brokers["broker-b"].answers[RequestCode.GET_CONSUME_STATS] = reply(1, "tired")
    overview = await admin.groups.overview()
    assert overview.groups[0].behind == 3
    assert [name.split()[0] for name in overview.failed] == ["broker-b"]


async def test_a_thousand_groups_that_never_connected_cost_two_requests_each(
    cluster: FakeCluster, admin: Admin
) -> None:
    names = [f"group-{number:04}" for number in range(1000)]
    table = SubscriptionGroupTable(subscription_group_table={name: SubscriptionGroupConfig(name) for name in names})
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(body=table)
        broker.answers[RequestCode.GET_CONSUME_STATS] = reply(body=ConsumeStats())
        broker.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = NOT_ONLINE
    overview = await admin.groups.overview()
    assert [one.group for one in overview.groups] == [GROUP, *names]
    for broker in cluster.brokers.values():
        assert len(broker.asked) == 1 + 2 * len(overview.groups)


async def test_a_broker_that_does_not_tell_its_groups_is_not_asked_about_each(
    cluster: FakeCluster, admin: Admin
) -> None:
    a, b = cluster.brokers.values()
    a.answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(
        body=SubscriptionGroupTable(subscription_group_table={"fresh": SubscriptionGroupConfig("fresh")})
    )
    a.answers[RequestCode.GET_CONSUME_STATS] = reply(body=behind("broker-a", 3))
    a.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = NOT_ONLINE
    b.answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = reply(1, "tired")
    overview = await admin.groups.overview()
    (fresh,) = (one for one in overview.groups if one.group == "fresh")
    assert fresh.behind == 3
    assert [broker.name for broker in fresh.failed] == ["broker-b"]
    assert {"consumerGroup": "fresh"} not in b.fields(RequestCode.GET_CONSUME_STATS)


async def test_creating_and_deleting_send_what_the_genuine_tool_sends(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP] = reply()
    cluster.broker.answers[RequestCode.DELETE_SUBSCRIPTIONGROUP] = reply()
    config = SubscriptionGroupConfig(
        "gsgroup_cfg",
        consume_from_min_enable=False,
        consume_broadcast_enable=False,
        retry_queue_nums=2,
        retry_max_times=3,
    )
    created = await admin.groups.create(config, broker=cluster.broker.address)
    assert not created.failed
    assert cluster.broker.asked[-1].body_bytes == (
        b'{"brokerId":0,"consumeBroadcastEnable":false,"consumeEnable":true,"consumeFromMinEnable":false,'
        b'"groupName":"gsgroup_cfg","notifyConsumerIdsChangedEnable":true,"retryMaxTimes":3,"retryQueueNums":2,'
        b'"whichBrokerWhenConsumeSlowly":1}'
    )
    await admin.groups.delete("gsgroup_cfg", broker="broker-a")
    assert cluster.broker.fields(207) == [mqadmin_sent("topic_admin", 207)]
    with pytest.raises(MessageError):
        await admin.groups.create(SubscriptionGroupConfig("no spaces"))


async def test_configurations_of_a_genuine_broker_are_read(cluster: FakeCluster, admin: Admin) -> None:
    cluster.broker.answers[RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG] = genuine("topic_admin", 201)
    configs = await admin.groups.configs(broker="broker-a")
    (table,) = configs.done.values()
    assert table["gsgroup_cfg"].retry_max_times == 3


async def test_running_info_is_asked_of_the_broker_the_member_is_connected_to(
    cluster: FakeCluster, admin: Admin
) -> None:
    a, b = cluster.brokers.values()
    a.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = NOT_ONLINE
    b.answers[RequestCode.GET_CONSUMER_CONNECTION_LIST] = reply(body=members("10.0.0.9@c54557"))
    b.answers[RequestCode.GET_CONSUMER_RUNNING_INFO] = genuine("admin_consumer", 307)
    info = await admin.groups.running_info(GROUP, "10.0.0.9@c54557", with_stack=True)
    assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
    assert {**mqadmin_sent("admin_consumer", 307), "consumerGroup": GROUP, "jstackEnable": "true"} == b.fields(307)[0]
    with pytest.raises(ClientNotFound, match="no member other"):
        await admin.groups.running_info(GROUP, "other")
    b.answers[RequestCode.GET_CONSUMER_RUNNING_INFO] = reply(207, "no answer from the consumer")
    with pytest.raises(ConsumeMessageTimeout):
        await admin.groups.running_info(GROUP, "10.0.0.9@c54557")


async def test_offsets_in_the_memory_of_members(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS] = genuine("admin_consumer", 223)
    status = await admin.groups.offsets_in_members(GROUP, TOPIC, "10.0.0.9@c54557")
    for answer in status.done.values():
        assert answer.consumer_table["10.0.0.9@c54557"][MessageQueue("gsTopicOrder", "broker-a", 0)] == 5
    assert len(status.done) == 2


async def test_producers_of_a_group(cluster: FakeCluster, admin: Admin) -> None:
    cluster.brokers["broker-a"].answers[RequestCode.GET_PRODUCER_CONNECTION_LIST] = genuine("admin_consumer", 204)
    cluster.brokers["broker-b"].answers[RequestCode.GET_PRODUCER_CONNECTION_LIST] = reply(1, "not exist")
    found = await admin.groups.producers("gspg_admin", TOPIC)
    (connection,) = found.done.values()
    assert [member.client_id for member in connection.connection_set] == ["10.0.0.9@i602"]
    assert [type(error) for error in found.failed.values()] == [InternalError]
