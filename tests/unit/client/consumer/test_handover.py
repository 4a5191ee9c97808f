from __future__ import annotations

import asyncio

import pytest

from downrange.client.consumer.handover import Handover
from downrange.client.consumer.retry import Later
from downrange.client.consumer.workers import NotConsumed
from tests.unit.client.consumer.received import message


async def test_a_message_is_done_when_the_next_is_asked_for() -> None:
    handover = Handover()
    offers = [asyncio.create_task(handover.offer(message(offset))) for offset in (1, 2)]
    messages = handover.messages()
    assert (await anext(messages)).queue_offset == 1
    await asyncio.sleep(0)
    assert not offers[0].done()
    assert (await anext(messages)).queue_offset == 2
    assert await offers[0] is None
    await messages.aclose()
    handover.close()
    with pytest.raises(NotConsumed):
        await offers[1]


async def test_a_message_may_be_put_off() -> None:
    handover = Handover()
    offer = asyncio.create_task(handover.offer(message(1)))
    messages = handover.messages()
    handover.later(await anext(messages), Later(4))
    waiting = asyncio.create_task(anext(messages))
    assert await offer == Later(4)
    handover.close()
    with pytest.raises(StopAsyncIteration):
        await waiting


async def test_only_the_message_in_hand_can_be_put_off() -> None:
    with pytest.raises(ValueError, match="not being consumed"):
        Handover().later(message(1), Later())


async def test_a_loop_that_is_left_gives_its_message_to_the_next_loop() -> None:
    handover = Handover()
    offer = asyncio.create_task(handover.offer(message(1)))
    messages = handover.messages()
    await anext(messages)
    await messages.aclose()
    other = handover.messages()
    assert (await anext(other)).queue_offset == 1
    assert not offer.done()
    handover.close()
    await other.aclose()
    with pytest.raises(NotConsumed):
        await offer


async def test_loops_share_the_messages_and_end_with_the_consumer() -> None:
    handover = Handover()
    seen: list[int] = []

    async def loop() -> None:
        async for received in handover.messages():
            seen.append(received.queue_offset)
            await asyncio.sleep(0)

    loops = [asyncio.create_task(loop()) for _ in range(3)]
    await asyncio.gather(*(handover.offer(message(offset)) for offset in range(20)))
    assert sorted(seen) == list(range(20))
    handover.close()
    await asyncio.gather(*loops)


async def test_a_loop_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    handover = Handover()
    messages = handover.messages()
    waiting = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    offer = asyncio.create_task(handover.offer(message(1)))
    await asyncio.sleep(0)  # offered, and the waiting loop is about to be woken
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other = handover.messages()
    assert (await asyncio.wait_for(anext(other), 1)).queue_offset == 1
    handover.close()
    await other.aclose()
    with pytest.raises(NotConsumed):
        await offer


async def test_after_the_end_nothing_is_taken() -> None:
    handover = Handover()
    handover.close()
    with pytest.raises(NotConsumed):
        await handover.offer(message(1))
    assert [received async for received in handover.messages()] == []
