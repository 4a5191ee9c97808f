from __future__ import annotations

import asyncio

from downrange.clock import ManualClock, sleep_or_set


async def test_a_manual_clock_wakes_sleepers_in_the_order_of_their_times() -> None:
    clock = ManualClock(1000)
    woken: list[tuple[str, int]] = []

    async def sleeper(name: str, seconds: float, times: int) -> None:
        for _ in range(times):
            await clock.sleep(seconds)
            woken.append((name, clock.now()))

    tasks = [asyncio.create_task(sleeper("slow", 3, 1)), asyncio.create_task(sleeper("fast", 1, 4))]
    await asyncio.sleep(0)
    await clock.advance(3.5)
    assert woken == [("fast", 2000), ("fast", 3000), ("slow", 4000), ("fast", 4000)]
    assert clock.now() == 4500
    await clock.advance(10)
    assert woken[-1] == ("fast", 5000)
    await asyncio.gather(*tasks)


async def test_a_manual_clock_tells_who_sleeps_and_for_how_long() -> None:
    clock = ManualClock()
    gone, short, long = (asyncio.create_task(clock.sleep(seconds)) for seconds in (1, 2, 3))
    assert clock.sleeping == []
    await asyncio.sleep(0)
    assert clock.sleeping == [1, 2, 3]
    gone.cancel()
    await asyncio.sleep(0)
    await clock.advance(0.5)
    assert clock.sleeping == [1.5, 2.5]
    await clock.advance(2.5)
    assert clock.sleeping == []
    await asyncio.gather(short, long)


async def test_a_clock_set_by_hand_wakes_nobody() -> None:
    clock = ManualClock(1000)
    sleeper = asyncio.create_task(clock.sleep(5))
    await asyncio.sleep(0)
    clock.set(100)
    assert clock.now() == 100
    await asyncio.sleep(0)
    assert not sleeper.done()
    sleeper.cancel()


async def test_a_sleep_ends_when_its_event_is_set_or_its_time_is_over() -> None:
    clock, event = ManualClock(), asyncio.Event()
    sleeping = asyncio.create_task(sleep_or_set(clock, 5, event))
    await asyncio.sleep(0)
    event.set()
    await sleeping
    assert clock.sleeping == []
    event.clear()
    sleeping = asyncio.create_task(sleep_or_set(clock, 5, event))
    while not clock.sleeping:
        await asyncio.sleep(0)
    await clock.advance(5)
    await sleeping
    assert event.is_set()
