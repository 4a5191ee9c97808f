"""Plans against a real broker: they show what is done, do exactly that, and refuse when the state has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from downrange import AsyncProducer, AsyncPushConsumer, ConsumeFromWhere, ConsumerConfig, Message, ReceivedMessage
from downrange.client.admin import Admin
from downrange.client.admin.plans import PlanDrifted, PlanKind, PlanRequest, consumed_again, skipped
from downrange.client.config import ClientConfig
from downrange.client.consumer.pull import PullConsumer
from downrange.client.errors import GroupOnline, NoRoute
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig
from downrange.testing import EmbeddedBroker, broker

TOPIC, GROUP, OTHER = "orders", "billing", "audit"
QUEUES = [MessageQueue(TOPIC, "broker-a", number) for number in range(2)]


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic(TOPIC, 2)
        yield running


@pytest.fixture
async def admin(mq: EmbeddedBroker) -> AsyncIterator[Admin]:
    """Ten messages in each queue; of the first queue the group has consumed four, and another group eight."""
    async with Admin(ClientConfig.of(mq.namesrv)) as client:
        for group in (GROUP, OTHER):
            await client.groups.create(SubscriptionGroupConfig(group))
        await send(mq, 10)
        await commit(client, GROUP, 4)
        await commit(client, OTHER, 8)
        yield client


async def send(mq: EmbeddedBroker, count: int) -> None:
    async with AsyncProducer("shop", mq.namesrv) as producer:
        for number in range(count):
            for queue in QUEUES:
                await producer.send(Message(TOPIC, b"%d" % number), queue=queue)


async def commit(admin: Admin, group: str, *offsets: int) -> None:
    reader = PullConsumer(group, session=admin.session)
    for queue, offset in zip(QUEUES, offsets, strict=False):
        await reader.commit(queue, offset)


async def committed(admin: Admin, group: str) -> list[int | None]:
    reader = PullConsumer(group, session=admin.session)
    return [await reader.committed(queue) for queue in QUEUES]


async def test_what_is_skipped_is_what_was_planned_though_messages_came_meanwhile(
    mq: EmbeddedBroker, admin: Admin
) -> None:
    plan = await admin.plans.skip(GROUP, TOPIC)
    first, second = plan.changes
    assert (first.server, first.subject, first.before, first.after) == ("broker-a", "queue 0", 4, 10)
    assert (skipped(first), consumed_again(first), plan.destroys) == (6, 0, True)
    await send(mq, 3)
    outcome = await admin.plans.apply(plan)
    assert not outcome.failed
    assert await committed(admin, GROUP) == [first.after, second.after]


async def test_a_plan_is_refused_when_an_offset_moved_meanwhile(admin: Admin) -> None:
    plan = await admin.plans.reset(GROUP, TOPIC, 0)
    assert (consumed_again(plan.changes[0]), plan.destroys) == (4, False)
    await commit(admin, GROUP, 7)
    with pytest.raises(PlanDrifted, match="queue 0 of broker-a moved from 4 to 7 meanwhile; nothing was"):
        await admin.plans.apply(plan)
    assert (await committed(admin, GROUP))[0] == 7
    await admin.plans.apply(plan, while_consuming=True)
    assert await committed(admin, GROUP) == [0, 0]
    backwards = await admin.plans.skip(GROUP, TOPIC)
    await commit(admin, GROUP, 3)
    later = await admin.plans.skip(GROUP, TOPIC)
    await commit(admin, GROUP, 2)
    assert backwards.changes != later.changes
    with pytest.raises(PlanDrifted, match="moved from 3 to 2"):
        await admin.plans.apply(later, while_consuming=True)


async def test_a_clone_shows_what_the_target_loses(admin: Admin) -> None:
    plan = await admin.plans.clone(OTHER, GROUP, TOPIC)
    assert (plan.changes[0].before, plan.changes[0].after, plan.destroys) == (4, 8, True)
    assert (await committed(admin, GROUP))[0] == 4
    await admin.plans.apply(plan)
    assert (await committed(admin, GROUP))[0] == 8


async def test_one_queue_moves_and_the_others_stay(admin: Admin) -> None:
    plan = await admin.plans.queue(GROUP, QUEUES[1], 5)
    assert [(change.subject, change.after) for change in plan.changes] == [("queue 1", 5)]
    await admin.plans.apply(plan)
    assert await committed(admin, GROUP) == [4, 5]
    (error,) = (await admin.plans.queue(GROUP, QUEUES[1], 11)).failed.values()
    assert isinstance(error, MessageError)
    with pytest.raises(NoRoute, match="no queue 7"):
        await admin.plans.queue(GROUP, QUEUES[0]._replace(queue_id=7), 0)


async def test_running_members_are_told_and_end_up_where_the_plan_says(mq: EmbeddedBroker, admin: Admin) -> None:
    got: list[bytes] = []

    async def take(message: ReceivedMessage) -> None:
        got.append(message.body)

    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, persist_consumer_offset_seconds=0.1)
    stopped = await admin.plans.reset(GROUP, TOPIC, 0)
    async with AsyncPushConsumer(GROUP, mq.namesrv, config, on_message=take) as consumer:
        await consumer.subscribe(TOPIC)
        async with asyncio.timeout(30):
            while await committed(admin, GROUP) != [10, 10]:
                pass
        with pytest.raises(PlanDrifted, match="members of billing run on broker-a"):
            await admin.plans.apply(stopped, while_consuming=True)
        with pytest.raises(GroupOnline, match="stop them first"):
            await admin.plans.apply(await admin.plans.clone(OTHER, GROUP, TOPIC))
        seen = len(got)
        plan = await admin.plans.reset(GROUP, TOPIC, 0)
        assert [change.after for change in plan.changes] == [0, 0]
        outcome = await admin.plans.apply(plan)
        (moves,) = outcome.done.values()
        assert [move.target for move in moves.moves] == [0, 0]
        async with asyncio.timeout(30):
            while len(got) < seen + 20:
                await asyncio.sleep(0.01)


async def test_the_age_of_what_waits_is_told(admin: Admin) -> None:
    (spans,) = (await admin.offsets.time_spans(GROUP, TOPIC)).done.values()
    by_queue = {span.message_queue: span for span in spans}
    assert by_queue[QUEUES[0]].min_time_stamp <= by_queue[QUEUES[0]].consume_time_stamp
    assert by_queue[QUEUES[0]].delay_time >= 0


async def test_deleting_a_topic_names_who_reads_it_and_notices_a_new_reader(admin: Admin) -> None:
    plan = await admin.plans.make(PlanRequest(PlanKind.DELETE_TOPIC, TOPIC))
    assert plan.notes == ("the group audit reads it", "the group billing reads it")
    assert (plan.destroys, plan.changes[0].context["messages"]) == (True, 20)
    await admin.groups.create(SubscriptionGroupConfig("late"))
    await commit(admin, "late", 1)
    with pytest.raises(PlanDrifted, match="the group late reads it"):
        await admin.plans.apply(plan)
    await admin.plans.apply(await admin.plans.make(PlanRequest(PlanKind.DELETE_TOPIC, TOPIC)))
    with pytest.raises(NoRoute):
        await admin.topics.route(TOPIC)


async def test_deleting_a_group_takes_its_offsets(admin: Admin) -> None:
    plan = await admin.plans.make(PlanRequest(PlanKind.DELETE_GROUP, GROUP, remove_offsets=True))
    assert [(change.server, change.subject) for change in plan.changes] == [("broker-a", "group billing")]
    await admin.plans.apply(plan)
    assert GROUP not in (await admin.groups.names()).names


@pytest.mark.parametrize(
    ("request_", "before"),
    [
        (
            PlanRequest(PlanKind.BROKER_SETTINGS, "broker-a", settings={"fileReservedTime": "48"}, broker="broker-a"),
            "72",
        ),
        (PlanRequest(PlanKind.TOPIC_SETTINGS, TOPIC, settings={"readQueueNums": "3"}), "2"),
        (PlanRequest(PlanKind.GROUP_SETTINGS, GROUP, settings={"retryMaxTimes": "3"}), "16"),
    ],
)
async def test_settings_show_the_old_value_and_are_refused_when_it_changed(
    admin: Admin, request_: PlanRequest, before: str
) -> None:
    ((name, value),) = request_.settings.items()
    plan = await admin.plans.make(request_)
    (change,) = plan.changes
    assert (change.subject, change.before, change.after) == (name, before, value)
    other = await admin.plans.make(request_)
    assert not (await admin.plans.apply(plan)).failed
    (now,) = (await admin.plans.make(request_)).changes
    assert now.before == value
    with pytest.raises(PlanDrifted, match=f"{name} of broker-a moved from {before} to {value}"):
        await admin.plans.apply(other)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (PlanKind.TOPIC_SETTINGS, {"colour": "1"}, "readQueueNums"),
        (PlanKind.TOPIC_SETTINGS, {"perm": "rw"}, "expected a number"),
        (PlanKind.GROUP_SETTINGS, {"retryMaxTimes": "many"}, "expected a number"),
        (PlanKind.GROUP_SETTINGS, {"consumeEnable": "maybe"}, "true or false"),
        (PlanKind.GROUP_SETTINGS, {"colour": "red"}, "no setting colour"),
        (PlanKind.RESET, {}, "needs more"),
    ],
)
async def test_what_cannot_be_planned_is_said(
    admin: Admin, kind: PlanKind, settings: dict[str, str], says: str
) -> None:
    name = TOPIC if kind is PlanKind.TOPIC_SETTINGS else GROUP
    with pytest.raises(MessageError, match=says):
        await admin.plans.make(PlanRequest(kind, name, settings=settings))
