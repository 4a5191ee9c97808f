"""Groups of consumer processes that come, go and are killed while messages flow."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from downrange.client.config import ClientConfig
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.consumer.push import AsyncPushConsumer
from downrange.client.producer.producer import AsyncProducer
from downrange.client.session import Session
from downrange.model.errors import MQError
from downrange.model.message import Message
from tests.support import push_member
from tests.support.lasting_port import lasting_port
from tests.support.processes import Running
from tests.support.standalone_process import standalone_process

TOPIC = "orders"


class Event(NamedTuple):
    """One line of a member's journal."""

    what: str
    process: int
    broker: str
    queue_id: int
    offset: int
    number: int
    nanos: int


class Group:
    """Members of one group that write into one journal."""

    def __init__(self, stack: ExitStack, namesrv: str, kind: str, journal: Path) -> None:
        self._stack = stack
        self._arguments = (namesrv, "billing", TOPIC, kind, str(journal))
        self._journal = journal
        self.killed: dict[int, int] = {}

    def start(self) -> Running:
        process = Running(*self._arguments, program=(sys.executable, push_member.__file__))
        self._stack.callback(process.close)
        process.wait_for("ready")
        return process

    def events(self) -> list[Event]:
        if not self._journal.exists():
            return []
        lines = [line.split() for line in self._journal.read_text().splitlines()]
        return [Event(a, int(b), c, int(d), int(e), int(f), int(g)) for a, b, c, d, e, f, g in lines]

    def done(self) -> set[int]:
        return {event.number for event in self.events() if event.what == "end"}


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


async def come_and_go(stack: ExitStack, tmp_path: Path, kind: str, total: int, *, ends_with: int) -> list[Event]:
    """Four members one after the other; the second ends with a signal, the first is stopped, the third is frozen."""
    cluster = stack.enter_context(standalone_process(tmp_path, {"defaultTopicQueueNums": 8}))
    group = Group(stack, cluster.namesrv, kind, tmp_path / "journal")
    async with AsyncProducer("producers", cluster.namesrv) as producer:

        async def send(first: int, last: int) -> None:
            for number in range(first, last):
                await producer.send(Message(TOPIC, str(number).encode(), keys=f"k{number}"))

        await send(0, total // 4)
        first = group.start()
        second = group.start()
        await send(total // 4, total // 2)
        third = group.start()
        await until(lambda: len(group.done()) > total // 8)
        second.signal(ends_with)
        second.wait()
        await send(total // 2, total * 3 // 4)
        fourth = group.start()
        third.signal(signal.SIGSTOP)
        await send(total * 3 // 4, total)
        third.signal(signal.SIGCONT)
        assert first.stop() == 0
        await until(lambda: len(group.done()) == total, seconds=100)
        for member in (third, fourth):
            assert member.stop() == 0
    return group.events()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("total", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_every_message_is_handled_whoever_dies(stack: ExitStack, tmp_path: Path, total: int) -> None:
    events = await come_and_go(stack, tmp_path, "concurrent", total, ends_with=signal.SIGKILL)
    ends = [event.number for event in events if event.what == "end"]
    assert set(ends) == set(range(total))
    # Only what was on its way or not yet committed when a queue changed hands comes twice.
    assert len(ends) - total < 1000
    assert len({event.process for event in events}) == 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "ends_with",
    [
        signal.SIGTERM,
        # The broker keeps the locks of the dead for a minute: it cannot know that they do not consume any more.
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
async def test_order_is_kept_and_no_queue_has_two_consumers(stack: ExitStack, tmp_path: Path, ends_with: int) -> None:
    total = 4000
    events = await come_and_go(stack, tmp_path, "orderly", total, ends_with=ends_with)
    ends = [event.number for event in events if event.what == "end"]
    assert set(ends) == set(range(total))
    if ends_with == signal.SIGTERM:
        assert len(ends) == total  # a hand-over in order repeats nothing
    by_queue: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_queue[event.queue_id].append(event)
    for queue in by_queue.values():
        check_order(queue)


async def test_a_broker_that_is_killed_and_started_again_is_consumed_again(tmp_path: Path) -> None:
    seen: list[int] = []

    async def consume(message: ReceivedMessage) -> None:
        seen.append(int(message.body))

    async def send(producer: AsyncProducer, first: int, last: int) -> None:
        for number in range(first, last):
            await producer.send(Message(TOPIC, str(number).encode()), timeout=20)

    with ExitStack() as first_run:
        namesrv_port, broker_port = lasting_port(), lasting_port()
        cluster = first_run.enter_context(
            standalone_process(tmp_path, namesrv_port=namesrv_port, broker_port=broker_port)
        )
        consumer = AsyncPushConsumer("billing", cluster.namesrv, on_message=consume)
        await consumer.subscribe(TOPIC)
        async with AsyncProducer("producers", cluster.namesrv) as producer:
            await send(producer, 0, 100)
            await consumer.start()
            await until(lambda: len(seen) == 100)
            assert await consumer.commit()
            cluster.process.signal(signal.SIGKILL)
            cluster.process.wait()
            with standalone_process(tmp_path, namesrv_port=namesrv_port, broker_port=broker_port) as again:
                assert again.broker == cluster.broker
                await topic_is_served(again.namesrv)
                await send(producer, 100, 200)
                await until(lambda: set(seen) == set(range(200)))
                await consumer.close()


async def topic_is_served(namesrv: str) -> None:
    async with Session(ClientConfig.of(namesrv)) as session, asyncio.timeout(20):
        while True:
            try:
                await session.look_up_route(TOPIC)
            except MQError:
                await asyncio.sleep(0.02)
            else:
                return


@pytest.mark.parametrize(
    "journal",
    [
        "begin 1 0, begin 1 1, end 1 1",  # two at once in one process
        "begin 1 0, begin 2 0, end 1 0, end 2 0",  # a second owner while the first one lives
        "begin 1 0, end 1 0, begin 1 2, end 1 2",  # one was skipped
        "end 1 0",
    ],
)
def test_the_check_of_the_order_finds_planted_faults(journal: str) -> None:
    words = [line.split() for line in journal.split(", ")]
    events = [Event(what, int(process), "b", 0, int(offset), 0, 0) for what, process, offset in words]
    with pytest.raises(AssertionError):
        check_order(events)


def check_order(events: list[Event]) -> None:
    """The journal of one queue: a callback begins after the one before has ended, or its process has died.

    Offsets go up one by one; a new owner may begin again where the last commit was, never further on.
    """
    farthest = -1
    running: Event | None = None
    for event in events:
        if event.what == "begin":
            assert running is None or running.process != event.process, f"{event} began during {running}"
            assert event.offset <= farthest + 1, f"{event} skips messages after {farthest}"
            running = event
        else:
            assert running is not None, f"{event} ended and never began"
            assert (running.process, running.offset) == (event.process, event.offset), f"{event} during {running}"
            farthest = max(farthest, event.offset)
            running = None
