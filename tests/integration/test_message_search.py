"""Messages by the time they were stored, over all queues of two brokers, a page at a time and both ways."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from downrange import AsyncProducer, Message
from downrange.client.admin import Admin
from downrange.client.admin.search import Budget, SearchCursor, WrongCursor
from downrange.client.config import ClientConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.clock import ManualClock
from downrange.model.errors import MessageError
from downrange.model.message import MessageQueue
from downrange.model.sql.errors import SqlError
from downrange.model.topics import TopicConfig
from tests.support.two_brokers import TwoBrokers, two_brokers

TOPIC = "orders"
START = 1_700_000_000_000
COUNT = 240
STEP = 10
"""Milliseconds from one message to the next; of every third pair both have one store time."""


@pytest.fixture(params=[True, False], ids=["sql on brokers", "sql refused"])
def can_filter(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def cluster(tmp_path: Path, can_filter: bool) -> AsyncIterator[TwoBrokers]:
    clock = ManualClock(START)
    options = {"enable_property_filter": can_filter}
    async with two_brokers(tmp_path, broker_options=options, clock=clock) as running:
        async with Admin(ClientConfig.of(running.namesrv)) as admin:
            assert not (await admin.topics.create(TopicConfig(TOPIC, 3, 3))).failed
        async with AsyncProducer("shop", running.namesrv) as producer:
            queues = [MessageQueue(TOPIC, name, number) for name in ("broker-a", "broker-b") for number in range(3)]
            for number in range(COUNT):
                tag = "rare" if number % 40 == 7 else "usual"
                message = Message(TOPIC, f"body {number}".encode(), tag, properties={"n": str(number)})
                await producer.send(message, queue=queues[number % len(queues)])
                if number % 3:
                    await clock.advance(STEP / 1000)
        yield running


@pytest.fixture
async def admin(cluster: TwoBrokers) -> AsyncIterator[Admin]:
    async with Admin(ClientConfig.of(cluster.namesrv)) as client:
        yield client


def numbers(messages: object) -> list[int]:
    assert isinstance(messages, list)
    return [int(message.properties["n"]) for message in messages]


def time_of(number: int) -> int:
    return START + STEP * sum(1 for earlier in range(number) if earlier % 3)


def in_order(messages: list[ReceivedMessage]) -> bool:
    times = [message.store_timestamp for message in messages]
    return times == sorted(times)


async def pages(admin: Admin, backwards: bool, size: int, **wanted: object) -> list[list[ReceivedMessage]]:
    found: list[list[ReceivedMessage]] = []
    cursor = None
    while True:
        page = await admin.messages.between(
            TOPIC,
            cursor=cursor,
            backwards=backwards,
            budget=Budget(messages=size, seconds=20),
            **wanted,  # type: ignore[arg-type]
        )
        assert not page.failed
        found.append(list(page.messages))
        cursor = SearchCursor.decode((page.before if backwards else page.after).encode())
        if page.is_last:
            return found


@pytest.mark.parametrize("backwards", [False, True])
async def test_pages_have_every_message_once_in_order_of_time(admin: Admin, backwards: bool) -> None:
    found = await pages(admin, backwards, 17)
    merged = [message for page in (reversed(found) if backwards else found) for message in page]
    assert sorted(numbers(merged)) == list(range(COUNT))
    assert in_order(merged)
    assert all(len(page) == 17 for page in found[:-1])


@pytest.mark.parametrize("backwards", [False, True])
async def test_the_messages_at_both_edges_of_the_range_are_found(admin: Admin, backwards: bool) -> None:
    first, last = 41, 73
    (page,) = await pages(admin, backwards, 1000, begin=time_of(first), end=time_of(last))
    expected = [number for number in range(COUNT) if time_of(first) <= time_of(number) <= time_of(last)]
    assert sorted(numbers(page)) == expected
    assert {first, last} <= set(expected)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"tags": "rare || none"}, lambda number: number % 40 == 7),
        ({"sql": "n >= 30 AND n < 35"}, lambda number: 30 <= number < 35),
        ({"text": "body 11"}, lambda number: number == 11 or number // 10 == 11),
        ({"tags": "usual", "text": "7"}, lambda number: "7" in str(number) and number % 40 != 7),
    ],
)
async def test_only_what_matches_is_on_a_page(
    admin: Admin, backwards: bool, wanted: dict[str, str], expected: Callable[[int], bool]
) -> None:
    found = [message for page in await pages(admin, backwards, 3, **wanted) for message in page]
    assert sorted(numbers(found)) == [number for number in range(COUNT) if expected(number)]


async def test_a_page_says_who_filtered(admin: Admin, can_filter: bool) -> None:
    page = await admin.messages.between(TOPIC, sql="n = 3")
    assert page.filtered_here is not can_filter


async def test_the_page_before_a_page_ends_where_it_begins(admin: Admin) -> None:
    first = await admin.messages.between(TOPIC, budget=Budget(messages=20))
    second = await admin.messages.between(TOPIC, cursor=first.after, budget=Budget(messages=20))
    again = await admin.messages.between(TOPIC, cursor=second.before, backwards=True, budget=Budget(messages=20))
    assert numbers(list(again.messages)) == numbers(list(first.messages))


async def test_a_search_that_looked_at_enough_goes_on_where_it_stopped(admin: Admin) -> None:
    budget, text = Budget(looked_at=1), f"body {COUNT - 1}"
    page = await admin.messages.between(TOPIC, text=text, budget=budget)
    assert (list(page.messages), page.is_last) == ([], False)
    seen = [page.looked_at]
    while not page.is_last:
        page = await admin.messages.between(
            TOPIC, text=f"body {COUNT - 1}", cursor=page.after, budget=Budget(looked_at=1)
        )
        seen.append(page.looked_at)
        if page.messages:
            break
    assert numbers(list(page.messages)) == [COUNT - 1]
    assert sum(seen) <= 2 * COUNT


async def test_what_cannot_be_searched_for_is_said(admin: Admin) -> None:
    with pytest.raises(SqlError, match="position"):
        await admin.messages.between(TOPIC, sql="n >")
    with pytest.raises(MessageError, match="TAGS"):
        await admin.messages.between(TOPIC, sql="n > 1", tags="A")
    with pytest.raises(WrongCursor, match="damaged"):
        SearchCursor.decode("never")
    with pytest.raises(WrongCursor, match="another topic"):
        await admin.messages.between(TOPIC, cursor=SearchCursor({MessageQueue("other", "broker-a", 0): 1}))


async def test_a_broker_that_is_gone_is_named_and_the_other_is_searched(cluster: TwoBrokers, admin: Admin) -> None:
    before = await admin.messages.between(TOPIC, budget=Budget(messages=1000))
    await cluster.b.server.stop()
    page = await admin.messages.between(TOPIC, budget=Budget(messages=1000))
    assert {queue.broker_name for queue in page.failed} == {"broker-b"}
    assert len(page.messages) == len(before.messages) / 2
    assert not page.is_last
