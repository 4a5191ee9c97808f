from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from downrange.broker.groups import CommittedOffsets
from downrange.broker.live_config import LiveConfig
from downrange.broker.services.housekeeping import save_offsets
from downrange.clock import ManualClock
from tests.unit.broker.wired import BROKER, WatchedFile
from tests.unit.store.small_store import small_config


async def test_committed_offsets_are_saved_every_five_seconds_also_after_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = WatchedFile(tmp_path / "config" / "consumerOffset.json")
    offsets = CommittedOffsets(file)
    clock = ManualClock()
    task = asyncio.create_task(save_offsets(offsets, LiveConfig(BROKER, small_config(tmp_path)), clock))
    await asyncio.sleep(0)
    (tmp_path / "config").write_bytes(b"in the way")
    offsets.commit("orders", "g", 0, 7)
    await clock.advance(5)
    await file.over.wait()
    while "cannot save consumer offsets" not in caplog.text:
        await asyncio.sleep(0)
    (tmp_path / "config").unlink()
    file.over.clear()
    await clock.advance(5)
    await file.over.wait()
    assert CommittedOffsets(file).get("orders", "g", 0) == 7
    task.cancel()
