from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from downrange.broker.services.flushing import Flusher
from downrange.clock import ManualClock
from downrange.store.config import FlushDiskType
from downrange.store.files import OS_FILES, Files, OsFiles
from downrange.store.group_commit import FlushOutcome
from tests.unit.broker.wired import WiredBroker, wire
from tests.unit.store.small_store import FailingFiles, new_message


@contextlib.asynccontextmanager
async def flushing(
    root: Path, files: Files = OS_FILES, flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
) -> AsyncIterator[WiredBroker]:
    """A broker, under SYNC_FLUSH unless told otherwise, with its flusher at work."""
    broker = wire(root, files=files, flush_disk_type=flush_disk_type)
    running = asyncio.create_task(broker.flusher.run(broker.writer.dispatched))
    try:
        yield broker
    finally:
        running.cancel()
        await asyncio.wait([running])
        broker.close()


def flushed(flusher: Flusher, end_offset: int) -> asyncio.Future[FlushOutcome]:
    """How waiting for the disk ends."""
    outcome: asyncio.Future[FlushOutcome] = asyncio.get_running_loop().create_future()
    flusher.tell_when_flushed(end_offset, outcome.set_result, may_block=False)
    return outcome


async def test_under_sync_flush_a_message_nobody_waits_for_reaches_the_disk_too(tmp_path: Path) -> None:
    async with flushing(tmp_path) as broker:
        await asyncio.sleep(0)
        end = broker.writer.append_one(new_message()).end_offset
        assert broker.store.flushed_offset < end
        async with asyncio.timeout(30):
            while broker.store.flushed_offset < end:
                await broker.clock.advance(0.1)
                await asyncio.sleep(0.001)  # the flush is another thread's


async def test_a_clock_that_is_set_back_puts_off_no_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flushing(tmp_path, flush_disk_type=FlushDiskType.ASYNC_FLUSH) as broker:
        clock = broker.clock
        while not clock.sleeping:
            await asyncio.sleep(0)
        end = broker.writer.append_one(new_message()).end_offset
        await clock.advance(9)
        right = clock.now
        monkeypatch.setattr(clock, "now", lambda: right() - 5000)
        await clock.advance(2)  # a thorough round is due every ten seconds
        async with asyncio.timeout(30):
            while broker.store.flushed_offset < end:
                await asyncio.sleep(0.001)  # the flush is another thread's; the clock stands still


async def test_a_message_that_could_not_be_dispatched_is_when_the_disk_has_room(tmp_path: Path) -> None:
    """Found by the simulation (seed 452): after a full disk a master took no messages until it was restarted."""
    async with flushing(tmp_path) as broker:
        broker.store.follower.failed(OSError(errno.ENOSPC, "No space left on device"))
        assert "dispatch" in broker.store.refusals
        async with asyncio.timeout(30):
            while broker.store.refusals:
                await broker.clock.advance(0.5)
                await asyncio.sleep(0.001)  # queues are synced in another thread
        broker.writer.append_one(new_message())


async def test_a_broker_that_has_nothing_to_sync_wakes_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = wire(tmp_path, flush_disk_type=FlushDiskType.ASYNC_FLUSH)
    calls: list[str] = []
    for name in ("flush_commit_log", "flush_queues"):
        right = getattr(broker.store, name)

        def called(*arguments: Any, name: str = name, right: Any = right, **options: Any) -> Any:
            calls.append(name)
            return right(*arguments, **options)

        monkeypatch.setattr(broker.store, name, called)
    running = asyncio.create_task(broker.flusher.run(broker.writer.dispatched))
    for _ in range(50):  # less than the time between thorough rounds
        await broker.clock.advance(0.1)
    assert calls == []
    end = broker.writer.append_one(new_message()).end_offset
    async with asyncio.timeout(30):
        while broker.store.flushed_offset < end:
            await broker.clock.advance(0.5)
            await asyncio.sleep(0.001)  # the flush is another thread's
    assert "flush_commit_log" in calls
    running.cancel()
    await asyncio.wait([running])
    broker.close()


class SlowDisk(OsFiles):
    """Notes which thread synced the log; `seconds` pass on the broker's clock meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_here: list[bool] = []
        self.clock: ManualClock | None = None

    def sync(self, descriptor: int) -> None:
        if self.clock is not None:
            self.is_here.append(threading.current_thread() is threading.main_thread())
            if self.seconds:
                self.clock.tick(self.seconds)
        super().sync(descriptor)


async def test_a_slow_sync_sends_the_next_ones_to_the_worker(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with flushing(tmp_path, disk) as broker:
        disk.clock = broker.clock
        async with asyncio.timeout(30):
            for seconds in (0.0, 0.0, 0.02, *[0.0] * 16, 0.0):
                disk.seconds = seconds
                end = broker.writer.append_one(new_message()).end_offset
                assert await flushed(broker.flusher, end) is FlushOutcome.FLUSHED
                assert broker.store.flushed_offset >= end
        assert disk.is_here == [True, True, True, *[False] * 16, True]


async def test_all_who_wait_are_told_by_one_sync(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with flushing(tmp_path, disk) as broker:
        disk.clock = broker.clock
        async with asyncio.timeout(30):
            waiting = [flushed(broker.flusher, broker.writer.append_one(new_message()).end_offset) for _ in range(5)]
            assert await asyncio.gather(*waiting) == [FlushOutcome.FLUSHED] * 5
        assert disk.is_here == [True]


async def test_a_sync_waits_for_those_who_are_coming_in(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with flushing(tmp_path, disk) as broker:
        disk.clock = broker.clock
        waiting = []
        async with asyncio.timeout(30):
            for _ in range(5):  # each turn of the loop reads a request of another connection
                waiting.append(flushed(broker.flusher, broker.writer.append_one(new_message()).end_offset))
                await asyncio.sleep(0)
            assert await asyncio.gather(*waiting) == [FlushOutcome.FLUSHED] * 5
            assert disk.is_here == [True]
            for _ in range(40):  # but not for ever
                waiting.append(flushed(broker.flusher, broker.writer.append_one(new_message()).end_offset))
                broker.clock.tick(0.0002)
                await asyncio.sleep(0)
            assert len(disk.is_here) > 3
            await asyncio.gather(*waiting)


async def test_room_is_prepared_as_soon_as_some_was_used(tmp_path: Path) -> None:
    broker = wire(tmp_path)
    running = asyncio.create_task(broker.flusher.run(lambda: None))
    await asyncio.sleep(0)
    broker.writer.append_one(new_message())
    async with asyncio.timeout(30):
        while broker.store.needs_next_file:
            await asyncio.sleep(0.001)  # another thread's work; the clock stands still
    assert (tmp_path / "store" / "commitlog" / "00000000000000065536").exists()
    running.cancel()
    await asyncio.wait([running])
    broker.close()


async def test_a_lone_sender_is_told_at_once(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with flushing(tmp_path, disk) as broker:
        disk.clock = broker.clock
        told: list[FlushOutcome] = []

        def send() -> bool:
            """Whether its outcome is known at once."""
            before = len(told)
            broker.flusher.tell_when_flushed(broker.writer.append_one(new_message()).end_offset, told.append)
            return len(told) > before

        async def at_once(*, together: int = 1) -> list[bool]:
            known = [send() for _ in range(together)]
            async with asyncio.timeout(30):
                while len(broker.flusher._waiting):
                    await asyncio.sleep(0.001)  # the flush may be another thread's
            await asyncio.sleep(0)
            return known

        alone = [(await at_once())[0] for _ in range(10)]
        assert alone == [False] * 8 + [True] * 2
        assert await at_once(together=3) == [True, False, False]
        assert len(disk.is_here) == 12  # the two who came in the same turn shared a sync
        alone = [(await at_once())[0] for _ in range(9)]
        assert alone == [False] * 8 + [True]
        disk.seconds = 0.02
        assert await at_once() == [True]
        assert await at_once() == [False]  # a slow disk is for the worker
        assert not disk.is_here[-1]
        assert told == [FlushOutcome.FLUSHED] * len(told)


async def test_a_lone_sender_is_told_when_the_disk_says_no(tmp_path: Path) -> None:
    files = FailingFiles()
    async with flushing(tmp_path, files) as broker:
        async with asyncio.timeout(30):
            for _ in range(8):
                assert (
                    await flushed(broker.flusher, broker.writer.append_one(new_message()).end_offset)
                    is FlushOutcome.FLUSHED
                )
        files.fail["sync"] = errno.EIO
        told: list[FlushOutcome] = []
        broker.flusher.tell_when_flushed(broker.writer.append_one(new_message()).end_offset, told.append)
        assert told == [FlushOutcome.FAILED]
        assert not broker.store.is_writable
