"""What tests of the console do to the cluster of the shop: messages, groups of their own, dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    ConsumeFromWhere,
    ConsumerConfig,
    Later,
    Message,
    ReceivedMessage,
)
from downrange.client.admin import Admin
from downrange.client.admin.offsets import END
from downrange.client.producer.send_result import SendResult
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig, dlq_topic

Callback = Callable[[ReceivedMessage], Awaitable[Later | None]]
CLUSTER = "DefaultCluster"


async def create_topic(admin: Admin, topic: str, queues: int = 2) -> None:
    await admin.topics.create(TopicConfig(topic, queues, queues), cluster=CLUSTER)


async def create_group(admin: Admin, group: str) -> None:
    await admin.groups.create(SubscriptionGroupConfig(group), cluster=CLUSTER)


async def send(admin: Admin, *messages: Message) -> list[SendResult]:
    async with AsyncProducer("testing", session=admin.session) as producer:
        return [await producer.send(message) for message in messages]


@asynccontextmanager
async def member(
    namesrv: str, group: str, topic: str, callback: Callback, expression: str = "*"
) -> AsyncIterator[AsyncPushConsumer]:
    """A running member of a group."""
    config = ConsumerConfig(
        consume_from_where=ConsumeFromWhere.FIRST_OFFSET, close_timeout_seconds=0.1, persist_consumer_offset_seconds=0.2
    )
    async with AsyncPushConsumer(group, namesrv, config, on_message=callback) as consumer:
        await consumer.subscribe(topic, expression)
        yield consumer


async def stored(admin: Admin, topic: str) -> int:
    """How many messages a topic has got."""
    if topic not in await admin.topics.names():
        return 0
    outcomes = await admin.topics.status(topic)
    return sum(queue.max_offset for one in outcomes.done.values() for queue in one.offset_table.values())


async def give_up(admin: Admin, namesrv: str, group: str, topic: str, count: int, *more: Message) -> None:
    """Dead letters of a group, as a member makes them that can do nothing with its messages."""

    async def refuse(message: ReceivedMessage) -> Later:
        return Later(delay_level=-1)

    await create_topic(admin, topic)
    letters = [Message(topic, b'{"letter": %d}' % number, keys=f"letter-{number}") for number in range(count)]
    await send(admin, *letters, *more)
    async with member(namesrv, group, topic, refuse) as consumer:
        await until_stored(admin, dlq_topic(group), count + len(more), 60, lambda: consumer)


async def until_stored(admin: Admin, topic: str, count: int, seconds: float, state: Callable[[], object] = str) -> None:
    """Wait until a topic has got so many messages; how many it has instead is in the error, and what `state` says."""
    has = 0
    try:
        async with asyncio.timeout(seconds):
            while (has := await stored(admin, topic)) < count:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{topic} has {has} of {count} messages after {seconds:g} s {state()}") from None


async def read_all(admin: Admin, group: str, topic: str) -> None:
    """The group has consumed everything, and nobody runs."""
    await create_group(admin, group)
    await admin.offsets.reset(group, topic, END)
