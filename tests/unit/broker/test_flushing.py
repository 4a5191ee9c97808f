from __future__ import annotations

import asyncio
from pathlib import Path

from downrange.store.config import FlushDiskType
from tests.unit.broker.wired import wire
from tests.unit.store.small_store import new_message


async def test_under_sync_flush_a_message_nobody_waits_for_reaches_the_disk_too(tmp_path: Path) -> None:
    broker = wire(tmp_path, flush_disk_type=FlushDiskType.SYNC_FLUSH)
    running = asyncio.create_task(broker.flusher.run(lambda: None))
    await asyncio.sleep(0)
    end = broker.writer.append(new_message()).end_offset
    assert broker.store.flushed_offset < end
    async with asyncio.timeout(10):
        while broker.store.flushed_offset < end:
            await broker.clock.advance(0.1)
            await asyncio.sleep(0.001)  # the flush is another thread's
    running.cancel()
    await asyncio.wait([running])
    broker.close()
