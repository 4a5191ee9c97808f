"""A small shop to look at in the web console: `python examples/shop.py NAMESRV`.

Orders come in steadily. One group keeps up, one is too slow and has given up on some messages, one has stopped, and the
members of one subscribe differently. Some messages are delayed, and two transactions have no end yet. Says `ready` when
all of that can be seen, and goes on until it is stopped with SIGTERM or Ctrl-C.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import NamedTuple

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    AsyncTransactionProducer,
    ConsumeFromWhere,
    ConsumerConfig,
    Later,
    LocalTransactionState,
    Message,
    MessageQueue,
    ProducerConfig,
    PullConsumer,
    ReceivedMessage,
    SendFailed,
)
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig, dlq_topic
from downrange.transport.loop import run

TOPIC = "orders"
BROKEN = 40
"""So many orders at first, which billing cannot read."""
ORDERS_PER_SECOND = 20
BILLING_SECONDS = 2.0
"""A member of billing takes so long for each order: together they manage a fifth of what comes in."""
CITIES = ("Kraków", "Lyon", "深圳", "Porto", "Oulu")


def order(number: int) -> Message:
    tag = ("new", "paid", "sent", "returned")[number % 4]
    amount = number * 37 % 900
    body = json.dumps({"order": number, "amount": amount, "city": CITIES[number % 5]}, ensure_ascii=False)
    properties = {"amount": str(amount), "region": ("eu", "us")[number % 2]}
    return Message(TOPIC, body.encode(), tags=tag, keys=f"order-{number}", properties=properties)


class Callbacks:
    """What the groups of the shop do with an order."""

    def __init__(self) -> None:
        self.given_up = 0

    async def bill(self, message: ReceivedMessage) -> Later | None:
        if message.tags == "broken":
            self.given_up += 1
            return Later(delay_level=-1)
        await asyncio.sleep(BILLING_SECONDS)
        return None

    async def index(self, message: ReceivedMessage) -> None:
        await asyncio.sleep(0.003)

    async def refund(self, message: ReceivedMessage) -> Later:
        return Later(delay_level=9)


class Member(NamedTuple):
    """One member of a group: what it subscribes to and does."""

    group: str
    does: str
    tags: str = "*"
    sql: str | None = None


MEMBERS = (
    Member("billing", "bill"),
    Member("billing", "bill"),
    Member("search-index", "index"),
    Member("mail", "index", "paid"),
    Member("mail", "index", "paid || sent"),
    Member("fraud", "index", sql="amount > 800"),
    Member("returns", "refund", "returned"),
)


@asynccontextmanager
async def members(namesrv: str, callbacks: Callbacks) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for member in MEMBERS:
            config = ConsumerConfig(
                consume_from_where=ConsumeFromWhere.FIRST_OFFSET,
                consume_threads=4,
                trace=member.group in ("search-index", "billing"),
                close_timeout_seconds=0.1,
            )
            callback = getattr(callbacks, member.does)
            consumer = AsyncPushConsumer(member.group, namesrv, config, on_message=callback)
            await stack.enter_async_context(consumer)
            await consumer.subscribe(TOPIC, member.tags, sql=member.sql)
        yield


async def undecided(message: ReceivedMessage) -> LocalTransactionState:
    return LocalTransactionState.UNKNOWN


async def send_waiting(producer: AsyncTransactionProducer) -> None:
    """Delayed messages, and transactions without an end."""
    for level in (16, 17, 17, 18):
        await producer.send(Message(TOPIC, b"remind the customer", tags="reminder", keys="reminder", delay_level=level))
    await producer.send(Message(TOPIC, b"close the books", tags="reminder", keys="month-end", deliver_after=3600))
    for number in (1, 2):
        await producer.send_half(Message(TOPIC, b"reserve the goods", tags="half", keys=f"reservation-{number}"))


async def leave_behind(admin: Admin, group: str) -> None:
    """A group that has read nothing yet and has no member."""
    await admin.groups.create(SubscriptionGroupConfig(group), cluster="DefaultCluster")
    outcomes = await admin.topics.status(TOPIC)
    async with PullConsumer(group, session=admin.session) as reader:
        for stats in outcomes.done.values():
            for queue in stats.offset_table:
                await reader.commit(MessageQueue(queue.topic, queue.broker_name, queue.queue_id), 0)


async def until_given_up(admin: Admin) -> None:
    """Returns when the dead letters of billing are stored."""
    async with asyncio.timeout(60):
        while True:
            names = await admin.topics.names()
            if dlq_topic("billing") in names:
                outcomes = await admin.topics.status(dlq_topic("billing"))
                ends = [queue.max_offset for one in outcomes.done.values() for queue in one.offset_table.values()]
                if sum(ends) >= BROKEN:
                    return
            await asyncio.sleep(0.1)


async def main(namesrv: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        Admin(ClientConfig.of(namesrv)) as admin,
        AsyncTransactionProducer("shop", namesrv, ProducerConfig(trace=True), check=undecided) as producer,
    ):
        await admin.topics.create(TopicConfig(TOPIC, 4, 4), cluster="DefaultCluster")
        for number in range(BROKEN):
            body = b'{"order": %d, "amount": ' % number
            await producer.send(Message(TOPIC, body, tags="broken", keys=f"broken-{number}"))
        await send_waiting(producer)
        await leave_behind(admin, "warehouse")
        async with members(namesrv, Callbacks()):
            await until_given_up(admin)
            print("ready", flush=True)
            await trade(producer, stop)


async def trade(producer: AsyncProducer, stop: asyncio.Event) -> None:
    """Send orders until told to stop."""
    for number in itertools.count(1):
        with suppress(SendFailed):  # the next order comes soon
            await producer.send(order(number))
        try:
            async with asyncio.timeout(1 / ORDERS_PER_SECOND):
                await stop.wait()
        except TimeoutError:
            continue
        return


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)  # brokers refuse some pulls of members that differ, and clients warn
    run(main(*sys.argv[1:]))
