"""Pull and lite pull consumers against a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from downrange import Message, MessageQueue
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.lite_pull import AsyncLitePullConsumer
from downrange.client.consumer.lite_pull_blocking import LitePullConsumer
from downrange.client.consumer.lite_pull_config import LitePullConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.pull import PullConsumer, PullStatus
from downrange.client.errors import ClientClosed, NoRoute, NotAssigned, SubscriptionConflict
from downrange.client.session import Session
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.groups import ConsumeFromWhere, MessageModel
from downrange.protocol.errors import BrokerError, NoPermission
from downrange.testing import EmbeddedBroker, broker
from tests.unit.client.scripted import until

FROM_FIRST = LitePullConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET)


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 4)
        yield running


def fill(mq: EmbeddedBroker, count: int, *, topic: str = "orders", tags: str | None = None, start: int = 0) -> None:
    producer = mq.producer()
    queues = producer.queues(topic)
    for number in range(start, start + count):
        producer.send(Message(topic, b"%d" % number, tags), queue=queues[number % len(queues)])
    producer.close()


def numbers(messages: list[ReceivedMessage]) -> list[int]:
    return [int(message.body) for message in messages]


async def read(consumer: AsyncLitePullConsumer, count: int) -> list[ReceivedMessage]:
    """Messages until there are `count`."""
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await consumer.poll(1)
    return found


async def nothing_more(consumer: AsyncLitePullConsumer) -> bool:
    return await consumer.poll(0.1) == []


# --- PullConsumer ---------------------------------------------------------------------------------------------------


async def test_queues_are_read_one_request_at_a_time(mq: EmbeddedBroker) -> None:
    fill(mq, 12)
    async with PullConsumer("readers", mq.namesrv) as consumer:
        queues = await consumer.queues("orders")
        assert [queue.queue_id for queue in queues] == [0, 1, 2, 3]
        result = await consumer.pull(queues[1], 0, max_messages=2)
        assert result.status is PullStatus.FOUND
        assert numbers(list(result.messages)) == [1, 5]
        assert (result.next_offset, result.min_offset, result.max_offset) == (2, 0, 3)
        assert result.messages[0].queue == queues[1]
        rest = await consumer.pull(queues[1], result.next_offset)
        assert numbers(list(rest.messages)) == [9]
        end = await consumer.pull(queues[1], rest.next_offset)
        assert (end.status, end.messages, end.next_offset) == (PullStatus.NO_NEW_MSG, (), 3)


async def test_a_pull_waits_for_the_next_message(mq: EmbeddedBroker) -> None:
    async with PullConsumer("readers", mq.namesrv) as consumer:
        queue = MessageQueue("orders", "broker-a", 0)
        waiting = asyncio.create_task(consumer.pull(queue, 0, wait=60))
        await asyncio.sleep(0)
        await asyncio.to_thread(fill, mq, 1)
        result = await asyncio.wait_for(waiting, 30)
        assert numbers(list(result.messages)) == [0]


async def test_a_pull_outside_the_queue_says_where_it_lies(mq: EmbeddedBroker) -> None:
    fill(mq, 4)
    async with PullConsumer("readers", mq.namesrv) as consumer:
        result = await consumer.pull(MessageQueue("orders", "broker-a", 0), 77)
        assert (result.status, result.next_offset) == (PullStatus.OFFSET_ILLEGAL, 1)


async def test_only_the_tags_asked_for_are_returned(mq: EmbeddedBroker) -> None:
    # "AaAa" and "BBBB" share Java's hash code: the broker lets both through.
    fill(mq, 4, tags="AaAa")
    fill(mq, 4, tags="BBBB", start=4)
    fill(mq, 4, tags="C", start=8)
    async with PullConsumer("readers", mq.namesrv) as consumer:
        queue = MessageQueue("orders", "broker-a", 0)
        assert numbers(list((await consumer.pull(queue, 0, subscription="AaAa || C")).messages)) == [0, 8]
        nobody = await consumer.pull(queue, 0, subscription="D")
        assert (nobody.status, nobody.next_offset) == (PullStatus.NO_MATCHED_MSG, 3)


async def test_compressed_bodies_are_read_as_they_were_sent(mq: EmbeddedBroker) -> None:
    mq.producer().send(Message("orders", b"long" * 5000), queue=MessageQueue("orders", "broker-a", 2))
    async with PullConsumer("readers", mq.namesrv) as consumer:
        (message,) = (await consumer.pull(MessageQueue("orders", "broker-a", 2), 0)).messages
        assert message.body == b"long" * 5000


async def test_offsets_of_a_group_and_of_a_queue(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    queue = MessageQueue("orders", "broker-a", 3)
    async with PullConsumer("readers", mq.namesrv) as consumer:
        assert (await consumer.min_offset(queue), await consumer.max_offset(queue)) == (0, 2)
        await consumer.commit(queue, 2)
        assert await consumer.committed(queue) == 2
        second = (await consumer.pull(queue, 1)).messages[0]
        assert await consumer.offset_at(queue, second.store_timestamp) in (0, 1)
        assert await consumer.offset_at(queue, 0) == 0
    async with PullConsumer("others", mq.namesrv) as other:
        assert await other.committed(queue) == 0  # a young queue, says the broker


async def test_a_topic_nobody_serves(mq: EmbeddedBroker) -> None:
    async with PullConsumer("readers", mq.namesrv) as consumer:
        with pytest.raises(NoRoute, match="nowhere"):
            await consumer.queues("nowhere")


# --- LitePullConsumer: reading --------------------------------------------------------------------------------------


async def test_everything_is_read_once_and_in_the_order_of_each_queue(mq: EmbeddedBroker) -> None:
    fill(mq, 100)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders")
        messages = await read(consumer, 100)
        assert await nothing_more(consumer)
    assert sorted(numbers(messages)) == list(range(100))
    for queue in range(4):
        own = [int(message.body) for message in messages if message.queue_id == queue]
        assert own == list(range(queue, 100, 4))


async def test_a_poll_wakes_when_a_message_comes(mq: EmbeddedBroker) -> None:
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders")
        waiting = asyncio.create_task(consumer.poll(60))
        await asyncio.sleep(0)
        await asyncio.to_thread(fill, mq, 1)
        assert numbers(await asyncio.wait_for(waiting, 30)) == [0]


async def test_the_next_consumer_goes_on_where_the_last_one_closed(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as first:
        await first.subscribe("orders")
        seen = await read(first, 15)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as second:
        await second.subscribe("orders")
        rest = await read(second, 40 - len(seen))
        assert await nothing_more(second)
    assert sorted(numbers(seen + rest)) == list(range(40))


async def test_messages_whose_handling_failed_come_again(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    done: list[ReceivedMessage] = []
    failed: list[ReceivedMessage] = []
    with contextlib.suppress(ZeroDivisionError):
        async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as first:
            await first.subscribe("orders")
            done += await first.poll(5)
            failed += await first.poll(5)
            raise ZeroDivisionError
    assert done
    assert failed
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as second:
        await second.subscribe("orders")
        rest = await read(second, 8 - len(done))
    assert set(numbers(failed)) <= set(numbers(rest))
    assert not set(numbers(done)) & set(numbers(rest))


async def test_without_auto_commit_only_commit_counts(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    config = LitePullConfig(auto_commit=False, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    async with AsyncLitePullConsumer("readers", mq.namesrv, config) as first:
        await first.subscribe("orders")
        kept = await first.poll(5)
        await first.commit()
        assert await first.committed(kept[0].queue) == kept[-1].queue_offset + 1
        await first.poll(5)
    async with AsyncLitePullConsumer("readers", mq.namesrv, config) as second:
        await second.subscribe("orders")
        assert len(await read(second, 40 - len(kept))) == 40 - len(kept)
        assert await nothing_more(second)


async def test_tags_are_compared_as_texts_and_what_was_left_out_is_committed_too(mq: EmbeddedBroker) -> None:
    fill(mq, 4, tags="AaAa")
    fill(mq, 4, tags="BBBB", start=4)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders", "AaAa")
        assert sorted(numbers(await read(consumer, 4))) == [0, 1, 2, 3]
        await until(lambda: all(consumer.position(queue) == 2 for queue in consumer.assignment))
    async with PullConsumer("readers", mq.namesrv) as reader:
        assert [await reader.committed(queue) for queue in await reader.queues("orders")] == [2, 2, 2, 2]


async def test_iteration_commits_message_by_message(mq: EmbeddedBroker) -> None:
    fill(mq, 12)
    seen = []
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as first:
        await first.subscribe("orders")
        async for message in first:
            seen.append(int(message.body))
            if len(seen) == 5:
                break
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as second:
        await second.subscribe("orders")
        rest = numbers(await read(second, 7))
        assert await nothing_more(second)
    assert sorted(seen + rest) == list(range(12))


async def test_an_expression_no_broker_can_evaluate_is_refused_at_once(mq: EmbeddedBroker) -> None:
    async with AsyncLitePullConsumer("readers", mq.namesrv) as consumer:
        with pytest.raises(BrokerError):
            await consumer.subscribe("orders", sql="price > > 3")


async def test_a_broker_that_refuses_is_heard_by_poll(mq: EmbeddedBroker) -> None:
    queue = MessageQueue("orders", "broker-a", 0)
    async with AsyncLitePullConsumer("readers", mq.namesrv) as consumer:
        await consumer.assign([queue])
        assert await nothing_more(consumer)
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            await admin.topics.create(TopicConfig("orders", 4, 4, perm=2))
        await asyncio.to_thread(fill, mq, 1)  # ends the pull the broker holds
        with pytest.raises(NoPermission):
            await read(consumer, 100)


async def test_a_topic_that_comes_later_is_found(mq: EmbeddedBroker) -> None:
    config = LitePullConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, rebalance_seconds=0.05)
    async with AsyncLitePullConsumer("readers", mq.namesrv, config) as consumer:
        await consumer.subscribe("later")
        assert await nothing_more(consumer)
        await asyncio.to_thread(fill, mq, 4, topic="later")
        assert sorted(numbers(await read(consumer, 4))) == [0, 1, 2, 3]


async def test_a_young_queue_is_read_from_its_first_message_whatever_the_settings(mq: EmbeddedBroker) -> None:
    fill(mq, 4)
    async with AsyncLitePullConsumer("readers", mq.namesrv) as consumer:  # CONSUME_FROM_LAST_OFFSET
        await consumer.subscribe("orders")
        assert len(await read(consumer, 4)) == 4


async def test_namespaces_are_put_on_and_taken_off(mq: EmbeddedBroker) -> None:
    fill(mq, 4, topic="tenant%invoices")
    config = LitePullConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, namespace="tenant")
    async with AsyncLitePullConsumer("readers", mq.namesrv, config) as consumer:
        await consumer.subscribe("invoices")
        messages = await read(consumer, 4)
        assert {message.topic for message in messages} == {"invoices"}
        await consumer.seek_to_begin(MessageQueue("invoices", "broker-a", 0))
        assert len(await read(consumer, 1)) == 1


async def test_broadcasting_consumers_each_get_everything_and_remember_it_in_a_file(
    mq: EmbeddedBroker, tmp_path: Path
) -> None:
    fill(mq, 8)

    def config(name: str) -> LitePullConfig:
        return LitePullConfig(
            message_model=MessageModel.BROADCASTING,
            consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
            instance_name=name,
            local_offset_store_dir=tmp_path,
        )

    for name in ("one", "two"):
        async with AsyncLitePullConsumer("readers", mq.namesrv, config(name)) as consumer:
            await consumer.subscribe("orders")
            assert len(await read(consumer, 8)) == 8
    await asyncio.to_thread(fill, mq, 2, start=8)
    async with AsyncLitePullConsumer("readers", mq.namesrv, config("one")) as consumer:
        await consumer.subscribe("orders")
        assert sorted(numbers(await read(consumer, 2))) == [8, 9]


# --- LitePullConsumer: sharing --------------------------------------------------------------------------------------


async def test_members_share_the_queues_and_hand_them_over(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    seen: list[int] = []
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as first:
        await first.subscribe("orders")
        assert len(first.assignment) == 4
        seen += numbers(await first.poll(5))
        async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as second:
            await second.subscribe("orders")
            # The broker tells the first one that it is not alone any more.
            await until(lambda: len(first.assignment) == 2 and len(second.assignment) == 2)
            assert not first.assignment & second.assignment
            seen += numbers(await second.poll(5))
        await until(lambda: len(first.assignment) == 4)
        while len(set(seen)) < 40:
            seen += numbers(await first.poll(1))
    assert sorted(set(seen)) == list(range(40))
    # What the first one held in hand when its queues moved on was read twice, and no more than that.
    assert len(seen) - 40 <= 10


async def test_a_topic_can_be_added_and_left(mq: EmbeddedBroker) -> None:
    fill(mq, 4)
    fill(mq, 4, topic="invoices", start=100)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders")
        await consumer.subscribe("invoices")
        assert len(await read(consumer, 8)) == 8
        await consumer.unsubscribe("orders")
        assert {queue.topic for queue in consumer.assignment} == {"invoices"}


async def test_an_operator_can_rewind_a_running_group(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders")
        await read(consumer, 8)
        await consumer.commit()
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            moved = await admin.offsets.reset("readers", "orders", 0)
            assert [moves.online for moves in moved.done.values()] == [True]
        assert sorted(numbers(await read(consumer, 8))) == list(range(8))


async def test_operators_can_look_into_a_running_consumer(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.subscribe("orders", "*")
        await read(consumer, 8)
        await consumer.commit()
        async with Admin(ClientConfig.of(mq.namesrv)) as admin:
            info = await admin.groups.running_info("readers", consumer.session.client_id)
            assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_ACTIVELY"
            assert {queue.queue_id: row.commit_offset for queue, row in info.mq_table.items()} == dict.fromkeys(
                range(4), 2
            )


# --- LitePullConsumer: positions ------------------------------------------------------------------------------------


async def test_assigned_queues_can_be_sought_through(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    queue = MessageQueue("orders", "broker-a", 1)
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.assign([queue])
        assert numbers(await read(consumer, 10)) == list(range(1, 40, 4))
        await consumer.seek(queue, 8)
        assert numbers(await read(consumer, 2)) == [33, 37]
        await consumer.seek_to_begin(queue)
        first = (await consumer.poll(5, max_messages=1))[0]
        assert first.body == b"1"
        await consumer.seek_to_end(queue)
        assert consumer.position(queue) == 10
        assert await nothing_more(consumer)
        await consumer.seek_to_time(queue, first.store_timestamp - 1)
        assert (await consumer.poll(5))[0].body == first.body
        assert (await consumer.min_offset(queue), await consumer.max_offset(queue)) == (0, 10)
        await consumer.seek_to_end(queue)
        await asyncio.to_thread(fill, mq, 2, start=40)  # also after a seek the broker is asked at the new place
        assert numbers(await consumer.poll(5)) == [41]


async def test_an_assignment_can_be_replaced(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    queues = [MessageQueue("orders", "broker-a", number) for number in range(4)]
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.assign(queues[:2])
        assert sorted(numbers(await read(consumer, 4))) == [0, 1, 4, 5]
        await consumer.assign(queues[1:3])
        assert consumer.assignment == set(queues[1:3])
        assert numbers(await read(consumer, 2)) == [2, 6]
        with pytest.raises(NotAssigned, match="queue 3"):
            await consumer.seek(queues[3], 0)
        with pytest.raises(SubscriptionConflict):
            await consumer.subscribe("orders")


async def test_a_paused_queue_rests_and_goes_on(mq: EmbeddedBroker) -> None:
    fill(mq, 8)
    queues = [MessageQueue("orders", "broker-a", number) for number in range(2)]
    async with AsyncLitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        await consumer.assign(queues)
        consumer.pause([queues[0]])
        assert numbers(await read(consumer, 2)) == [1, 5]
        assert await nothing_more(consumer)
        consumer.resume([queues[0]])
        assert numbers(await read(consumer, 2)) == [0, 4]


# --- life -----------------------------------------------------------------------------------------------------------


async def test_closing_leaves_no_task_and_ends_a_poll_that_waits(mq: EmbeddedBroker) -> None:
    before = asyncio.all_tasks()
    consumer = await AsyncLitePullConsumer("readers", mq.namesrv).start()
    await consumer.subscribe("orders")
    waiting = asyncio.create_task(consumer.poll(30))
    await asyncio.sleep(0.05)
    await consumer.close()
    assert await waiting == []
    assert asyncio.all_tasks() == before
    with pytest.raises(ClientClosed, match="closed"):
        await consumer.poll()


async def test_what_was_not_started_or_has_nothing_to_read_says_so(mq: EmbeddedBroker) -> None:
    consumer = AsyncLitePullConsumer("readers", mq.namesrv)
    with pytest.raises(ClientClosed, match="not started"):
        await consumer.poll()
    async with consumer:
        with pytest.raises(SubscriptionConflict, match="subscribe"):
            await consumer.poll(0)


async def test_consumers_may_share_a_session(mq: EmbeddedBroker) -> None:
    fill(mq, 4)
    async with (
        Session(ClientConfig.of(mq.namesrv)) as session,
        AsyncLitePullConsumer("one", config=FROM_FIRST, session=session) as one,
    ):
        await one.subscribe("orders")
        async with AsyncLitePullConsumer("two", config=FROM_FIRST, session=session) as two:
            await two.subscribe("orders")
            assert len(await read(two, 4)) == 4
        assert len(await read(one, 4)) == 4
        async with AsyncLitePullConsumer("one", mq.namesrv, FROM_FIRST) as other:
            await other.subscribe("orders")
            await until(lambda: len(one.assignment) == 2)


# --- the blocking face ----------------------------------------------------------------------------------------------


def test_blocking_iteration_gives_back_what_it_did_not_get_to(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    seen: list[int] = []
    with LitePullConsumer("readers", mq.namesrv, FROM_FIRST) as first:
        first.subscribe("orders")
        for message in first:
            seen.append(int(message.body))
            if len(seen) == 13:
                break
    with LitePullConsumer("readers", mq.namesrv, FROM_FIRST) as second:
        second.subscribe("orders")
        while len(seen) < 40:
            seen += numbers(second.poll(1))
        assert second.poll(0.1) == []
    assert sorted(seen) == list(range(40))


def test_a_commit_inside_a_blocking_iteration_counts_to_the_message_in_hand(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    config = LitePullConfig(auto_commit=False, consume_from_where=ConsumeFromWhere.FIRST_OFFSET)
    seen = []
    with LitePullConsumer("readers", mq.namesrv, config) as consumer:
        consumer.subscribe("orders")
        for message in consumer:
            seen.append(int(message.body))
            consumer.commit()
            assert consumer.committed(message.queue) == message.queue_offset + 1
            if len(seen) == 15:
                break
    assert len(set(seen)) == 15


def test_the_blocking_face_has_the_same_calls(mq: EmbeddedBroker) -> None:
    fill(mq, 40)
    with LitePullConsumer("readers", mq.namesrv, FROM_FIRST) as consumer:
        queue = consumer.queues("orders")[1]
        consumer.assign([queue])
        assert consumer.assignment == {queue}
        assert numbers(consumer.poll(5)) == list(range(1, 40, 4))
        consumer.seek(queue, 9)
        assert consumer.position(queue) == 9
        assert numbers(consumer.poll(5)) == [37]
        consumer.pause([queue])
        consumer.seek_to_begin(queue)
        assert consumer.poll(0.1) == []
        consumer.resume([queue])
        assert consumer.poll(5, max_messages=1)[0].body == b"1"
        consumer.seek_to_end(queue)
        assert (consumer.min_offset(queue), consumer.max_offset(queue)) == (0, 10)
        consumer.seek_to_time(queue, 0)
        assert consumer.poll(5)[0].body == b"1"
    with pytest.raises(ClientClosed, match="closed"):
        consumer.poll()


def test_another_thread_may_close_a_consumer_that_waits(mq: EmbeddedBroker) -> None:
    consumer = LitePullConsumer("readers", mq.namesrv).start()
    consumer.subscribe("orders")
    seen: list[ReceivedMessage] = []
    reader = threading.Thread(target=lambda: seen.extend(consumer))
    reader.start()
    fill(mq, 3)
    consumer.close()
    reader.join(30)
    assert not reader.is_alive()
    assert not any(thread.name == "downrange" for thread in threading.enumerate())
