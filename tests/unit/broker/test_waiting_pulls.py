from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from downrange.broker.filtering import EVERYTHING, tag_filter
from downrange.broker.held_pulls import HeldPulls
from downrange.model.errors import MessageError
from downrange.model.message import TopicQueue
from downrange.model.subscription import subscribe
from downrange.protocol.command import Command
from downrange.store.queue.queues import QueueState
from downrange.store.run import Run
from downrange.transport.connection import Connection
from downrange.transport.handler import LaterReply
from tests.unit.broker.wired import FakeConnection

QUEUE = TopicQueue("orders", 0)
LONG = 60.0


class Asked:
    """An answer that counts how often it was asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Command:
        self.times += 1
        return Command(code=0, opaque=self.times)


def hold(
    held: HeldPulls,
    answer: Asked,
    *,
    queue: TopicQueue = QUEUE,
    offset: int = 0,
    tags: str = "*",
    connection: Connection | None = None,
    seconds: float = LONG,
) -> LaterReply:
    return held.hold(
        queue, offset, tag_filter(subscribe(queue.topic, tags)), answer, connection or FakeConnection(), seconds
    )


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_message_wakes_the_pulls_of_its_queue_once_per_turn() -> None:
    held, answer, other = HeldPulls(), Asked(), Asked()
    reply = hold(held, answer)
    (pull,) = held._by_queue[QUEUE]
    elsewhere = hold(held, other, queue=TopicQueue("orders", 1))
    assert held.is_waited_for(QUEUE)
    for offset in range(3):
        held.notify("orders", 0, offset, b"")
    assert not reply.done()
    await turn()
    assert reply.result() == Command(code=0, opaque=1)
    assert answer.times == 1
    assert pull.timer is not None
    assert pull.timer.cancelled()
    assert not elsewhere.done()
    assert not held.is_waited_for(QUEUE)
    assert len(held) == 1
    assert repr(held) == "<HeldPulls pulls=1 queues=1>"
    held.notify_all()


async def test_a_message_nobody_waits_for_is_forgotten() -> None:
    held, answer = HeldPulls(), Asked()
    held.notify("orders", 0, 0, b"")
    reply = hold(held, answer)
    await turn()
    assert not reply.done()
    held.notify_all()


async def test_only_messages_a_pull_wants_wake_it() -> None:
    held, answer = HeldPulls(), Asked()
    reply = hold(held, answer, tags="a || b")
    held.notify("orders", 0, 0, b"TAGS\x01c")
    await turn()
    assert not reply.done()
    held.notify("orders", 0, 1, b"TAGS\x01c")
    held.notify("orders", 0, 2, b"TAGS\x01b")
    await turn()
    assert reply.done()


async def test_each_pull_is_woken_by_what_it_wants_whoever_came_first() -> None:
    held, woken = HeldPulls(), []

    def remember(name: str) -> Callable[[], Command]:
        return lambda: woken.append(name) or Command(code=0)  # type: ignore[func-returns-value]

    for tags in ("c", "nothing", "*", "a || c", "b"):
        wanted = tag_filter(subscribe("orders", tags))
        held.hold(QUEUE, 0, wanted, remember(tags), FakeConnection(), LONG)
    for offset, tag in enumerate((b"a", b"b", b"c", b"d")):
        held.notify("orders", 0, offset, b"TAGS\x01" + tag)
    await turn()
    assert woken == ["c", "*", "a || c", "b"]
    held.notify_all()


async def test_of_a_run_each_pull_sees_the_messages_of_its_queue() -> None:
    held = HeldPulls()
    orders, bills = (
        cast(QueueState, SimpleNamespace(topic=name, queue_id=0, next_offset=0)) for name in ("orders", "bills")
    )
    waiting = {
        (queue.topic, tags, offset): hold(held, Asked(), queue=TopicQueue(queue.topic, 0), tags=tags, offset=offset)
        for queue in (orders, bills)
        for tags in ("a", "b", "*")
        for offset in (0, 1, 2)
    }
    sent = ((orders, b"a"), (bills, b"b"), (orders, b"c"))
    run = Run([(state, b"", b"TAGS\x01" + tag, "", 0, 0, 0, 0) for state, tag in sent], [], 310)
    orders.next_offset, bills.next_offset = 2, 1
    for state in (orders, bills):
        held.notify_run(state, run.states, run)
    await turn()
    woken = {which for which, reply in waiting.items() if reply.done()}
    everything = {("orders", "*", 0), ("orders", "*", 1), ("bills", "*", 0)}
    assert woken == everything | {("orders", "a", 0), ("orders", "a", 1), ("bills", "b", 0)}
    held.notify_all()


async def test_a_pull_beyond_the_end_waits_for_its_offset() -> None:
    held, answer = HeldPulls(), Asked()
    reply = hold(held, answer, offset=2)
    held.notify("orders", 0, 1, b"")
    await turn()
    assert not reply.done()
    held.notify("orders", 0, 2, b"")
    await turn()
    assert reply.done()


async def test_a_pull_is_answered_when_its_time_is_over() -> None:
    held, answer = HeldPulls(), Asked()
    assert await hold(held, answer, seconds=0.001) == Command(code=0, opaque=1)
    assert len(held) == 0


async def test_all_pulls_can_be_asked_again_at_once() -> None:
    held, answer = HeldPulls(), Asked()
    replies = [hold(held, answer, queue=TopicQueue("orders", number)) for number in range(3)]
    held.notify_all()
    assert all(reply.done() for reply in replies)
    assert answer.times == 3
    assert len(held) == 0


async def test_an_error_while_answering_is_the_answer() -> None:
    held = HeldPulls()

    def fail() -> Command:
        raise MessageError("gone")

    reply = held.hold(QUEUE, 0, EVERYTHING, fail, FakeConnection(), LONG)
    held.notify("orders", 0, 0, b"")
    await turn()
    with pytest.raises(MessageError, match="gone"):
        reply.result()


async def test_a_closed_connection_waits_for_nothing() -> None:
    held, answer = HeldPulls(), Asked()
    gone, stays = FakeConnection("10.0.0.9:1"), FakeConnection("10.0.0.9:2")
    dropped = [hold(held, answer, queue=TopicQueue("orders", number), connection=gone) for number in range(2)]
    kept = hold(held, answer, connection=stays)
    held.notify("orders", 0, 0, b"")
    held.drop(gone)
    assert all(reply.cancelled() for reply in dropped)
    await turn()
    assert kept.done()
    assert answer.times == 1
    assert len(held) == 0
    held.drop(gone)


async def test_a_reply_given_up_is_not_asked_for() -> None:
    held, answer = HeldPulls(), Asked()
    reply = hold(held, answer)
    reply.cancel()
    held.notify("orders", 0, 0, b"")
    await turn()
    assert answer.times == 0
    assert len(held) == 0
