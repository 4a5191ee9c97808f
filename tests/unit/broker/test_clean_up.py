"""Expired commit-log files are deleted one after another, with the pause that the configuration asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.broker.services.housekeeping import clean_up
from downrange.clock import ManualClock, SystemClock
from downrange.store.config import StoreConfig
from downrange.store.retention import Retention
from tests.unit.store.small_store import NOW, open_store, put


async def test_there_is_a_pause_between_the_deletions_of_two_log_files(tmp_path: Path) -> None:
    clock = ManualClock(NOW)
    config = LiveConfig(BrokerConfig(), StoreConfig(file_reserved_time=0, delete_commit_log_files_interval=250))
    with open_store(tmp_path, clock=clock, file_reserved_time=0) as store:
        for _ in range(4):
            put(store, bytes(3900))
        log = tmp_path / "commitlog"
        before = sorted(log.iterdir())
        task = asyncio.create_task(clean_up(Retention(store, hour_of=lambda now: 4), store, config, clock))
        await asyncio.sleep(0)
        clock.set(SystemClock().now() + 1000)  # the files were changed just now
        await clock.advance(0)
        async with asyncio.timeout(30):
            for deleted in (1, 2):
                while clock.sleeping != [0.25]:
                    await asyncio.sleep(0)
                assert sorted(log.iterdir()) == before[deleted:]
                await clock.advance(0.25)
            while clock.sleeping != [10.0]:
                await asyncio.sleep(0)
        assert sorted(log.iterdir()) == before[3:]
        task.cancel()
