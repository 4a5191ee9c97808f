"""When a broker registers, and that it stops doing so when told."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from downrange.broker.config import BrokerConfig
from downrange.broker.json_file import JsonFile
from downrange.broker.live_config import LiveConfig
from downrange.broker.services.registration import Registration
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.store.config import StoreConfig
from downrange.transport.pool import Pool


@pytest.mark.parametrize("turns", range(6))
async def test_it_stops_also_when_a_topic_changes_at_that_moment(tmp_path: Path, turns: int) -> None:
    config = LiveConfig(BrokerConfig(broker_name="broker-a"), StoreConfig(store_path_root_dir=tmp_path))
    topics = Topics(JsonFile(tmp_path / "topics.json"), config.broker, ManualClock())
    service = asyncio.create_task(Registration(config, topics, Pool()).run())
    await asyncio.sleep(0)
    topics.ensure("new", 1)
    for _ in range(turns):
        await asyncio.sleep(0)
    service.cancel()
    done, _ = await asyncio.wait([service], timeout=1)
    assert done, "the service runs on"
    assert service.cancelled()
