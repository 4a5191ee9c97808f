"""Moving groups: by their running members, by writing offsets, or not at all."""

from __future__ import annotations

import pytest

from downrange.client.admin import Admin
from downrange.client.admin.offsets import END, target_offset
from downrange.client.errors import GroupNotFound, GroupOnline, NoRoute
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.consumers import QueueOffsets
from downrange.protocol.bodies.groups import ConsumerConnection, SubscriptionGroupTable
from downrange.protocol.bodies.offsets import OffsetResponse
from downrange.protocol.bodies.statistics import ConsumeStats, OffsetWrapper
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.errors import InternalError
from tests.unit.client.fake_cluster import (
    GROUP,
    TOPIC,
    Answering,
    FakeBroker,
    FakeCluster,
    genuine,
    mqadmin_sent,
    reply,
)

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
CONNECTIONS = RequestCode.GET_CONSUMER_CONNECTION_LIST
NOT_ONLINE = reply(206, "no consumer online")
NO_OFFSET = reply(1, "THe consumer group <billing> not exist")
ONLINE = reply(body=ConsumerConnection())


def offline(broker: FakeBroker, committed: dict[int, int], *, group: str = GROUP) -> None:
    """Queue 0 ends at 10 and queue 1 at 20; at the time searched for they are at 4 and 5."""

    def by_queue(offsets: dict[int, int]) -> Answering:
        def answer(command: Command) -> Command:
            queue_id = int(command.ext_fields["queueId"])
            if queue_id not in offsets:
                return command.reply(22, "Not found")
            return command.reply(header=OffsetResponse(offsets[queue_id]))

        return answer

    broker.answers |= {
        RESET: NOT_ONLINE,
        CONNECTIONS: NOT_ONLINE,
        COMMIT: reply(),
        RequestCode.GET_MAX_OFFSET: by_queue({0: 10, 1: 20}),
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: by_queue({0: 4, 1: 5}),
        RequestCode.QUERY_CONSUMER_OFFSET: by_queue(committed),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: reply(
            body=SubscriptionGroupTable(subscription_group_table={group: SubscriptionGroupConfig(group)})
        ),
    }


def written(broker: FakeBroker) -> list[tuple[str, str, str]]:
    return [(sent["consumerGroup"], sent["queueId"], sent["commitOffset"]) for sent in broker.fields(COMMIT)]


async def test_brokers_with_running_members_do_it_themselves(cluster: FakeCluster, admin: Admin) -> None:
    table = QueueOffsets({MessageQueue(TOPIC, "broker-b", 1): 7})
    cluster.brokers["broker-a"].answers[RESET] = genuine("reset_offset", 222)
    cluster.brokers["broker-b"].answers[RESET] = reply(body=table)
    outcomes = await admin.offsets.reset(GROUP, TOPIC, END, force=False)
    assert outcomes.failed == {}
    a, b = outcomes.done.values()
    assert (a.online, a.applied) == (True, True)
    assert [(move.queue.queue_id, move.target) for move in a.moves] == [(0, 3), (1, 3)]
    assert [(move.queue.queue_id, move.target) for move in b.moves] == [(1, 7)]
    sent = {**mqadmin_sent("reset_offset", 222), "topic": TOPIC, "group": GROUP}
    assert cluster.broker.fields(RESET) == [sent]
    assert written(cluster.broker) == []


async def test_offsets_of_an_offline_group_are_written(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {0: 2})
    outcomes = await admin.offsets.reset(GROUP, TOPIC, 1_700_000_000_000)
    for moved in outcomes.done.values():
        assert (moved.online, moved.applied) == (False, True)
        assert [(move.max_offset, move.committed, move.target) for move in moved.moves] == [(10, 2, 4), (20, None, 5)]
    assert written(cluster.broker) == [(GROUP, "0", "4"), (GROUP, "1", "5")]
    assert cluster.broker.fields(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)[0] == {
        "topic": TOPIC,
        "queueId": "0",
        "timestamp": "1700000000000",
        "bname": "broker-a",
    }


async def test_skipping_goes_to_the_end(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {0: 2, 1: 3})
    await admin.offsets.skip_accumulated(GROUP, TOPIC)
    assert written(cluster.broker) == [(GROUP, "0", "10"), (GROUP, "1", "20")]
    assert cluster.broker.fields(RESET)[0]["timestamp"] == "-1"
    assert cluster.broker.fields(RESET)[0]["isForce"] == "true"


async def test_without_force_nothing_is_skipped(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {0: 2, 1: 9})
    await admin.offsets.reset(GROUP, TOPIC, 5, force=False)
    assert written(cluster.broker) == [(GROUP, "0", "2"), (GROUP, "1", "5")]


@pytest.mark.parametrize(
    ("wanted", "committed", "force", "target"),
    [(5, 9, False, 5), (9, 5, False, 5), (9, 5, True, 9), (-1, None, False, 0), (7, None, False, 7)],
)
def test_where_a_queue_goes(wanted: int, committed: int | None, force: bool, target: int) -> None:
    assert target_offset(wanted, committed, force) == target


async def test_a_dry_run_changes_nothing(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {0: 2})
    cluster.brokers["broker-b"].answers[CONNECTIONS] = ONLINE
    outcomes = await admin.offsets.reset(GROUP, TOPIC, END, dry_run=True)
    a, b = outcomes.done.values()
    assert [(move.committed, move.target) for move in a.moves] == [(2, 10), (None, 20)]
    assert (a.applied, a.online, b.online) == (False, False, True)
    for broker in cluster.brokers.values():
        assert written(broker) == []
        assert broker.fields(RESET) == []


async def test_a_mistyped_group_gets_no_offsets(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {}, group="another")
        broker.answers[RESET] = NO_OFFSET
    outcomes = await admin.offsets.reset(GROUP, TOPIC, END)
    assert outcomes.done == {}
    assert {type(error) for error in outcomes.failed.values()} == {GroupNotFound}
    assert written(cluster.broker) == []


async def test_a_known_offline_group_without_offsets_gets_them(cluster: FakeCluster, admin: Admin) -> None:
    offline(cluster.brokers["broker-a"], {})
    cluster.broker.answers[RESET] = NO_OFFSET
    cluster.brokers["broker-b"].answers[RESET] = reply(1, "disk on fire")
    outcomes = await admin.offsets.reset(GROUP, TOPIC, END)
    assert written(cluster.broker) == [(GROUP, "0", "10"), (GROUP, "1", "20")]
    assert [(one.name, type(error)) for one, error in outcomes.failed.items()] == [("broker-b", InternalError)]


async def test_offsets_are_not_written_under_running_members(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        offline(broker, {})
        broker.answers |= {RESET: NO_OFFSET, CONNECTIONS: ONLINE}
    outcomes = await admin.offsets.reset(GROUP, TOPIC, END)
    assert {type(error) for error in outcomes.failed.values()} == {GroupOnline}
    assert written(cluster.broker) == []


async def test_a_topic_nobody_serves_cannot_be_reset(cluster: FakeCluster, admin: Admin) -> None:
    with pytest.raises(NoRoute):
        await admin.offsets.reset(GROUP, "nothere", END)


async def test_cloning_writes_what_the_genuine_tool_writes(cluster: FakeCluster, admin: Admin) -> None:
    a, b = cluster.brokers.values()
    a.answers |= {
        RequestCode.GET_CONSUME_STATS: genuine("admin_consumer", 208),
        CONNECTIONS: NOT_ONLINE,
        COMMIT: reply(),
    }
    b.answers |= {RequestCode.GET_CONSUME_STATS: reply(body=ConsumeStats()), CONNECTIONS: NOT_ONLINE}
    await admin.offsets.clone(GROUP, "gscg_clone", "gsTopicOrder")
    assert a.fields(COMMIT) == [mqadmin_sent("admin_consumer", 15, nth) for nth in (0, 1)]
    assert b.fields(COMMIT) == []


async def test_cloning_is_refused_where_the_target_is_running(cluster: FakeCluster, admin: Admin) -> None:
    queue = MessageQueue(TOPIC, "broker-a", 0)
    stats = ConsumeStats(offset_table={queue: OffsetWrapper(broker_offset=9, consumer_offset=4)})
    a, b = cluster.brokers.values()
    a.answers |= {RequestCode.GET_CONSUME_STATS: reply(body=stats), CONNECTIONS: ONLINE, COMMIT: reply()}
    b.answers |= {RequestCode.GET_CONSUME_STATS: reply(1, "tired")}
    outcomes = await admin.offsets.clone(GROUP, "other", TOPIC)
    assert {one.name: type(error) for one, error in outcomes.failed.items()} == {
        "broker-a": GroupOnline,
        "broker-b": InternalError,
    }
    assert a.fields(COMMIT) == []


async def test_cloning_a_topic_that_was_never_consumed_is_refused(cluster: FakeCluster, admin: Admin) -> None:
    for broker in cluster.brokers.values():
        broker.answers[RequestCode.GET_CONSUME_STATS] = reply(body=ConsumeStats())
    with pytest.raises(GroupNotFound, match=f"the group {GROUP} has committed nothing of {TOPIC}"):
        await admin.offsets.clone(GROUP, "other", TOPIC)
