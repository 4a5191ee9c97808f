"""Sends that wait for a new master, attempts that are given up, and the looks at routes that errors ask for."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
from msgspec.structs import replace

from downrange.client.background_work import BackgroundWork
from downrange.client.config import ProducerConfig
from downrange.client.errors import NoMaster, NoRoute, SendFailed
from downrange.client.producer.blocking.producer import Producer
from downrange.client.route_chase import (
    FAILOVER_SECONDS,
    FIRST_PAUSE_SECONDS,
    FORGET_SECONDS,
    LONGEST_PAUSE_SECONDS,
    RARE_SECONDS,
    Pace,
    RouteChase,
    next_pace,
)
from downrange.clock import ManualClock, SystemClock
from downrange.model.message import Message, MessageQueue
from downrange.protocol.bodies.routes import TopicRouteData
from downrange.protocol.codes import ResponseCode
from downrange.protocol.errors import NoPermission
from tests.unit.client.fake_cluster import TOPIC, FakeCluster, reply
from tests.unit.client.scripted import (
    ScriptedNamesrv,
    Silence,
    answer_sends,
    in_turn,
    producer_of,
    route_of,
    scripted_namesrv,
    sends,
    stored,
    until,
    where_sends_went,
)

MESSAGE = Message(TOPIC, b"body")
PATIENT = ProducerConfig(send_timeout_seconds=20.0)
GIVEN = MessageQueue(TOPIC, "broker_a", 0)


# --- a broker that is the master no more ------------------------------------------------------------------------------

NOT_THE_MASTER = [
    (ResponseCode.SERVICE_NOT_AVAILABLE, "not the master any more"),
    (ResponseCode.NO_PERMISSION, "this broker is a slave"),
    (ResponseCode.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"),
]


@pytest.mark.parametrize(("code", "remark"), NOT_THE_MASTER)
@pytest.mark.parametrize("queue", [None, GIVEN])
async def test_who_is_the_master_no_more_makes_the_send_ask_for_the_route_and_go_to_the_new_one(
    cluster: FakeCluster, code: int, remark: str, queue: MessageQueue | None
) -> None:
    old, new = cluster.brokers["broker-a"], cluster.brokers["broker-b"]
    answer_sends(cluster, reply(code, remark), "broker-a")
    answer_sends(cluster, stored, "broker-b")
    async with (
        scripted_namesrv(broker_a=old.address) as (namesrv, _),
        producer_of(namesrv.address, config=PATIENT) as producer,
    ):
        await producer.queues(TOPIC)
        namesrv.routes[TOPIC] = route_of({"broker_a": new.address})
        result = await producer.send(MESSAGE, queue=queue)
        assert result.queue.broker_name == "broker_a"
        assert 1 <= len(sends(old)) <= 5
        assert len(sends(new)) == 1
        assert producer.statistics.waits <= 3


@pytest.mark.parametrize(("code", "remark"), NOT_THE_MASTER)
async def test_another_broker_takes_the_message_at_once(cluster: FakeCluster, code: int, remark: str) -> None:
    answer_sends(cluster, reply(code, remark), "broker-a")
    answer_sends(cluster, stored, "broker-b")
    async with producer_of(cluster.namesrv, config=PATIENT) as producer:
        for _ in range(8):
            assert (await producer.send(MESSAGE)).queue.broker_name == "broker-b"
        assert producer.statistics.waits == 0
    assert where_sends_went(cluster)["broker-a"] <= 2


async def test_a_refusal_that_no_route_changes_is_told_soon(cluster: FakeCluster) -> None:
    answer_sends(cluster, reply(ResponseCode.NO_PERMISSION, "the topic may not be written"))
    async with producer_of(cluster.namesrv, config=ProducerConfig(send_timeout_seconds=30)) as producer:
        begun = time.monotonic()
        with pytest.raises(SendFailed) as caught:
            await producer.send(MESSAGE)
        assert time.monotonic() - begun < 20
    assert isinstance(caught.value.error, NoPermission)
    assert len(caught.value.attempts) == 3


async def test_a_send_waits_until_a_master_is_registered(cluster: FakeCluster) -> None:
    answer_sends(cluster, stored)
    async with (
        scripted_namesrv(broker_a=cluster.broker.address) as (namesrv, _),
        producer_of(namesrv.address, config=PATIENT) as producer,
    ):
        await producer.send(MESSAGE)
        with_master = _slave_only(namesrv)
        await producer.session.refresh_followed()
        waiting = [asyncio.create_task(producer.send(MESSAGE)) for _ in range(100)]
        asked = len(namesrv.asked)
        await until(lambda: len(namesrv.asked) > asked + 2)
        assert not any(task.done() for task in waiting)
        namesrv.routes[TOPIC] = with_master
        await asyncio.gather(*waiting)
        assert len(namesrv.asked) - asked < 60, "one look for all who wait"


async def test_a_send_whose_topic_gets_no_master_says_so_in_the_end(cluster: FakeCluster) -> None:
    async with scripted_namesrv(broker_a=cluster.broker.address) as (namesrv, _):
        _slave_only(namesrv)
        async with producer_of(namesrv.address) as producer:
            with pytest.raises(NoMaster, match="no master is registered"):
                await producer.send(MESSAGE, timeout=0.3)
        async with producer_of(namesrv.address, config=ProducerConfig(fault_strategy="latency")) as producer:
            with pytest.raises(NoRoute):
                await producer.send(MESSAGE)


def _slave_only(namesrv: ScriptedNamesrv) -> TopicRouteData:
    """Take the master out of the route; returns the route as it was."""
    before = namesrv.routes[TOPIC]
    data = before.broker_datas[0]
    slaves = {1: data.broker_addrs[0]}
    namesrv.routes[TOPIC] = replace(before, broker_datas=(replace(data, broker_addrs=slaves),))
    return before


# --- attempts that are given up ---------------------------------------------------------------------------------------


async def test_a_hung_broker_costs_a_caller_little_and_the_result_says_that_it_may_be_stored_twice(
    cluster: FakeCluster,
) -> None:
    silence = Silence()
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv, config=PATIENT) as producer:
        for _ in range(20):
            assert (await producer.send(MESSAGE)).unanswered == 0
        answer_sends(cluster, silence, "broker-a")
        results = [await producer.send(MESSAGE) for _ in range(8)]
        assert {result.queue.broker_name for result in results} == {"broker-b"}
        assert sum(result.unanswered for result in results) == 1
        assert (producer.statistics.given_up, producer.statistics.unanswered) == (1, 1)
    silence.end()


async def test_a_message_for_one_queue_is_not_given_up(cluster: FakeCluster) -> None:
    """It can go nowhere else, so giving up early would only make duplicates."""
    silence = Silence()
    answer_sends(cluster, stored)
    async with producer_of(cluster.namesrv) as producer:
        for _ in range(20):
            await producer.send(MESSAGE)
        answer_sends(cluster, silence, "broker-a")
        begun = time.monotonic()
        with pytest.raises(SendFailed, match="1 attempt in"):
            await producer.send(MESSAGE, queue=MessageQueue(TOPIC, "broker-a", 0), timeout=0.4)
        assert time.monotonic() - begun >= 0.39
        assert producer.statistics.given_up == 0
    silence.end()


async def test_the_blocking_producer_gives_up_as_the_other_does(cluster: FakeCluster) -> None:
    silence = Silence()
    answer_sends(cluster, stored)

    def send(times: int) -> list[int]:
        return [producer.send(MESSAGE).unanswered for _ in range(times)]

    producer = await asyncio.to_thread(Producer("producers", cluster.namesrv, PATIENT).start)
    try:
        assert sum(await asyncio.to_thread(send, 20)) == 0
        answer_sends(cluster, silence, "broker-a")
        assert sum(await asyncio.to_thread(send, 8)) == 1
        assert producer.statistics.given_up == 1
    finally:
        silence.end()
        await asyncio.to_thread(producer.close)


async def test_an_error_is_an_answer_and_makes_no_duplicate(cluster: FakeCluster) -> None:
    answer_sends(cluster, in_turn(reply(ResponseCode.SYSTEM_ERROR), stored))
    async with producer_of(cluster.namesrv) as producer:
        assert (await producer.send(MESSAGE)).unanswered == 0
        assert producer.statistics.further_attempts == 1


# --- looks at routes --------------------------------------------------------------------------------------------------


def test_looks_come_at_growing_intervals_and_start_anew_after_a_while() -> None:
    pace, now, times = next_pace(None, 0.0), 0.0, [0.0]
    for _ in range(6):
        now = pace.next_at
        pace = next_pace(pace, now)
        times.append(now)
    gaps = [round(later - earlier, 3) for earlier, later in pairwise(times)]
    assert gaps == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]
    assert max(gaps) == LONGEST_PAUSE_SECONDS
    later = now + FORGET_SECONDS
    assert next_pace(pace, later) == Pace(later, later, FIRST_PAUSE_SECONDS)
    while pace.next_at < FAILOVER_SECONDS + 5:
        pace = next_pace(pace, pace.next_at)
    assert pace.pause_seconds == RARE_SECONDS


async def test_the_first_error_looks_at_once_and_the_next_ones_wait_their_turn() -> None:
    looked: list[str] = []
    work, clock = BackgroundWork(), ManualClock()

    async def look(topic: str) -> None:
        looked.append(topic)

    chase = RouteChase(clock, work, look)
    for _ in range(5):
        chase.soon(TOPIC)
        await asyncio.sleep(0)
    chase.soon("other")
    await until(lambda: len(looked) == 2)
    assert looked == [TOPIC, "other"]
    await clock.advance(FIRST_PAUSE_SECONDS)
    chase.soon(TOPIC)
    await until(lambda: looked.count(TOPIC) == 2)
    await work.cancel()


async def test_who_waits_is_told_of_the_change_and_nobody_looks_any_longer() -> None:
    looked: list[str] = []
    work = BackgroundWork()

    async def look(topic: str) -> None:
        looked.append(topic)
        if len(looked) == 4:
            chase.changed(topic)

    chase = RouteChase(SystemClock(), work, look)
    assert await asyncio.gather(*(chase.change(TOPIC, 20) for _ in range(10))) == [True] * 10
    assert len(looked) == 4
    assert await chase.change(TOPIC, 0.01) is False
    await until(lambda: repr(chase) == "<RouteChase []>")
    await work.cancel()
