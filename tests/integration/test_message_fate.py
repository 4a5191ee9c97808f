"""Why a message is not consumed, asked of a real broker with real consumers; delayed and half messages that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from downrange import (
    AsyncProducer,
    AsyncPushConsumer,
    AsyncTransactionProducer,
    ConsumeFromWhere,
    ConsumerConfig,
    Later,
    LocalTransactionState,
    Message,
    PullConsumer,
    ReceivedMessage,
)
from downrange.client.admin import Admin
from downrange.client.admin.timeline import EventKind
from downrange.client.admin.verdicts import Hidden, Verdict, VerdictKind
from downrange.client.config import ClientConfig
from downrange.client.dead_letters import DeadLetters
from downrange.client.errors import MessageNotFound
from downrange.client.producer.send_result import SendResult
from downrange.model.message import MessageQueue
from downrange.model.topics import SCHEDULE_TOPIC
from downrange.testing import EmbeddedBroker, broker
from tests.support.dead_letters import GROUP, give_up

TOPIC = "orders"
QUEUE = MessageQueue(TOPIC, "broker-a", 0)


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker(properties={"recallMessageEnable": "true"}) as running:
        running.create_topic(TOPIC, 1)
        yield running


@pytest.fixture
async def admin(mq: EmbeddedBroker) -> AsyncIterator[Admin]:
    async with Admin(ClientConfig.of(mq.namesrv)) as client:
        yield client


async def send(mq: EmbeddedBroker, message: Message) -> SendResult:
    async with AsyncProducer("shop", mq.namesrv) as producer:
        return await producer.send(message)


@asynccontextmanager
async def member(
    mq: EmbeddedBroker,
    group: str,
    on_message: Callable[[ReceivedMessage], Awaitable[Later | None]],
    expression: str = "*",
    *,
    sql: str | None = None,
) -> AsyncIterator[AsyncPushConsumer]:
    config = ConsumerConfig(consume_from_where=ConsumeFromWhere.FIRST_OFFSET, trace=False)
    async with AsyncPushConsumer(group, mq.namesrv, config, on_message=on_message) as consumer:
        await consumer.subscribe(TOPIC, expression, sql=sql)
        yield consumer


async def done(message: ReceivedMessage) -> None:
    return None


async def becomes(admin: Admin, sent: SendResult, group: str, kind: VerdictKind) -> Verdict:
    """Ask until the verdict is the expected one: members need a moment to read and to commit."""
    found: Verdict | None = None
    try:
        async with asyncio.timeout(30):
            while found is None or found.kind is not kind:
                fate = await admin.messages.fate(sent.message_id, TOPIC)
                found = next((one for one in fate.verdicts if one.group == group), None)
    except TimeoutError:
        raise AssertionError(f"{group}: {found}") from None
    return found


async def test_each_group_gets_its_own_verdict(mq: EmbeddedBroker, admin: Admin) -> None:
    first = await send(mq, Message(TOPIC, b"first", "paid"))
    sent = await send(mq, Message(TOPIC, b"second", "paid", properties={"n": "3"}))
    released = asyncio.Event()

    async def hold(message: ReceivedMessage) -> None:
        await released.wait()

    async def fail(message: ReceivedMessage) -> Later:
        return Later()

    async with AsyncExitStack() as stack:
        for group, callback, expression, sql in (
            ("good", done, "*", None),
            ("slow", hold, "*", None),
            ("other-tag", done, "sent", None),
            ("other-sql", done, "*", "n > 100"),
            ("failing", fail, "*", None),
        ):
            await stack.enter_async_context(member(mq, group, callback, expression, sql=sql))
        async with PullConsumer("gone", mq.namesrv) as reader:
            await reader.commit(QUEUE, 0)
        assert "committed up to" in (await becomes(admin, sent, "good", VerdictKind.CONSUMED)).reason
        waiting = await becomes(admin, sent, "slow", VerdictKind.WAITING)
        assert waiting.member is not None
        assert "'sent'" in (await becomes(admin, sent, "other-tag", VerdictKind.FILTERED)).reason
        assert "'n > 100'" in (await becomes(admin, sent, "other-sql", VerdictKind.FILTERED)).reason
        retried = await becomes(admin, sent, "failing", VerdictKind.RETRIED)
        assert retried.at is not None
        assert "retry 1 waits" in retried.reason
        assert (await becomes(admin, sent, "gone", VerdictKind.NOBODY)).ahead == 1
        by_place = await admin.messages.fate(first.offset_message_id)
        assert (by_place.queue, by_place.message.message_id) == (QUEUE, first.message_id)
        released.set()


async def test_a_dead_letter_is_given_up_until_it_is_sent_again(mq: EmbeddedBroker, admin: Admin) -> None:
    await give_up(mq, admin.session, Message(TOPIC, b"bad"))
    (letter,) = [one async for one in DeadLetters(admin.session, GROUP).read()]
    original = letter.message.message_id
    async with PullConsumer(GROUP, session=admin.session) as reader:
        await reader.commit(QUEUE, 1)
    (found,) = (await admin.messages.fate(original, TOPIC)).verdicts
    assert (found.kind, found.at) == (VerdictKind.GIVEN_UP, letter.message.store_timestamp)
    assert (await admin.messages.fate(letter.message.offset_message_id)).verdicts == (found,)
    async for _ in DeadLetters(admin.session, GROUP).resend(DeadLetters(admin.session, GROUP).read()):
        pass
    (found,) = (await admin.messages.fate(original, TOPIC)).verdicts
    assert found.kind is VerdictKind.RETRIED
    events = await admin.messages.timeline(original, TOPIC)
    assert [one.kind for one in events] == [EventKind.STORED, EventKind.GIVEN_UP, EventKind.RETRIED]
    assert [one.lane for one in events[1:]] == [f"group {GROUP}"] * 2


async def test_delayed_messages_are_not_visible_and_are_listed_by_level_and_timer(
    mq: EmbeddedBroker, admin: Admin
) -> None:
    async with PullConsumer("gone", session=admin.session) as reader:
        await reader.commit(QUEUE, 0)
    by_level = await send(mq, Message(TOPIC, b"later", delay_level=5))
    by_timer = await send(mq, Message(TOPIC, b"timed", deliver_after=3600))
    recalled = await send(mq, Message(TOPIC, b"recalled", deliver_after=3600))
    assert recalled.recall_handle is not None
    async with AsyncProducer("shop", mq.namesrv) as producer:
        await producer.recall(recalled.recall_handle)
    fate = await admin.messages.fate(by_level.message_id, TOPIC)
    assert fate.hidden is not None
    assert (fate.hidden.why, fate.queue.topic) == (Hidden.DELAYED, TOPIC)
    assert fate.hidden.due == fate.message.store_timestamp + 60_000
    (found,) = fate.verdicts
    assert (found.group, found.kind, found.at) == ("gone", VerdictKind.NOT_VISIBLE, fate.hidden.due)
    timed = (await admin.messages.fate(by_timer.message_id, TOPIC)).hidden
    assert timed is not None
    assert timed.due is not None
    async with asyncio.timeout(30):
        while True:  # until the broker has taken the timer messages in
            waiting = await admin.delayed.waiting()
            assert not waiting.failed
            (on_broker,) = waiting.done.values()
            if on_broker.timed:
                break
    assert [(one.level, one.count, one.delay_millis) for one in on_broker.levels] == [(5, 1, 60_000)]
    assert [(one.message.message_id, one.topic, one.level) for one in on_broker.soonest] == [
        (by_level.message_id, TOPIC, 5),
        (by_timer.message_id, TOPIC, None),
    ]
    assert [one.due for one in on_broker.soonest] == [fate.hidden.due, timed.due]
    (other,) = (await admin.delayed.waiting("other")).done.values()
    assert other.soonest == ()


async def test_open_half_messages_are_listed_once_and_ended_ones_are_not(mq: EmbeddedBroker, admin: Admin) -> None:
    async def undecided(message: ReceivedMessage) -> LocalTransactionState:
        return LocalTransactionState.UNKNOWN

    async with AsyncTransactionProducer("shop", mq.namesrv, check=undecided) as producer:
        states = (LocalTransactionState.UNKNOWN, LocalTransactionState.COMMIT, LocalTransactionState.ROLLBACK)
        halves = []
        for state in states:
            half = await producer.send_half(Message(TOPIC, state.name.encode()))
            await producer.end(half, state)
            halves.append(half.result)
    waiting, committed, rolled_back = halves
    async with asyncio.timeout(30):
        while True:  # ends are told without waiting for an answer
            (found,) = (await admin.transactions.open()).done.values()
            if len(found.messages) == 1:
                break
    (one,) = found.messages
    assert (one.message.message_id, one.topic, one.producer_group, one.checks) == (waiting.message_id, TOPIC, "shop", 0)
    assert found.is_certain
    assert (await admin.transactions.open("other")).done[
        next(iter((await admin.transactions.open()).done))
    ].messages == ()
    for result, why in ((waiting, Hidden.HALF), (committed, None), (rolled_back, Hidden.ROLLED_BACK)):
        hidden = (await admin.messages.fate(result.message_id, TOPIC)).hidden
        assert (None if hidden is None else hidden.why) is why


async def test_a_message_that_is_nowhere_is_not_found(mq: EmbeddedBroker, admin: Admin) -> None:
    with pytest.raises(MessageNotFound, match="in the topic orders"):
        await admin.messages.fate("C0A80001" * 4, TOPIC)
    with pytest.raises(MessageNotFound, match="name its topic"):
        await admin.messages.fate("C0A80001" * 4)
    assert SCHEDULE_TOPIC in await admin.topics.names()
