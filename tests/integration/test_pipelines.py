"""What pipelines tell about themselves, and how operators read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from downrange import Message
from downrange.client.admin import Admin
from downrange.client.admin.pipelines import PipelineNotFound
from downrange.client.config import ClientConfig
from downrange.client.pipeline_status import PIPELINES_TOPIC, PipelineReporter, PipelineStatus
from downrange.clock import ManualClock
from downrange.testing import EmbeddedBroker, broker

NOW = 1_900_000_000_000


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        yield running


@pytest.fixture
async def admin(mq: EmbeddedBroker) -> AsyncIterator[Admin]:
    async with Admin(ClientConfig.of(mq.namesrv)) as client:
        yield client


async def test_the_last_status_of_each_pipeline_is_listed_and_one_has_its_history(
    mq: EmbeddedBroker, admin: Admin
) -> None:
    assert await admin.pipelines.list() == ()
    with pytest.raises(PipelineNotFound, match=PIPELINES_TOPIC):
        await admin.pipelines.status("orders per minute")
    clock = ManualClock(NOW)
    reporter = PipelineReporter(mq.namesrv, clock)
    first = PipelineStatus("orders per minute", "stream", "orders", "parquet", {"orders": 7}, 10.5, None, 0.25)
    assert await asyncio.to_thread(reporter.tell, first)
    assert not await asyncio.to_thread(reporter.tell, first)  # too early
    assert await asyncio.to_thread(reporter.tell, PipelineStatus("archive", "archive"))
    failed = PipelineStatus("orders per minute", "stream", lag={"orders": 9}, last_error="no disk")
    await clock.advance(1)
    assert await asyncio.to_thread(reporter.tell, failed)  # an error is never too early
    await clock.advance(5)
    assert await asyncio.to_thread(reporter.tell, first)
    await asyncio.to_thread(reporter.close)
    await asyncio.to_thread(mq.producer().send, Message(PIPELINES_TOPIC, b"no status", keys="orders_per_minute"))
    listed = await admin.pipelines.list()
    assert [(one.name, one.behind, one.last_error) for one in listed] == [
        ("archive", 0, None),
        ("orders per minute", 7, None),
    ]
    history = await admin.pipelines.status("orders per minute")
    assert [(one.timestamp - NOW, one.last_error) for one in history] == [(0, None), (1000, "no disk"), (6000, None)]
    assert (history[0].source, history[0].target, history[0].rows_per_second, history[0].batch_seconds) == (
        "orders",
        "parquet",
        10.5,
        0.25,
    )
    with pytest.raises(PipelineNotFound, match="pipeline list"):
        await admin.pipelines.status("other")


async def test_a_status_is_json_with_the_name_as_key(mq: EmbeddedBroker) -> None:
    reporter = PipelineReporter(mq.namesrv, ManualClock(NOW))
    await asyncio.to_thread(reporter.tell, PipelineStatus("lake", "archive", lag={"orders": 3}))
    for lag in (2, 0):
        await asyncio.to_thread(reporter.tell, PipelineStatus("lake", "archive", lag={"orders": lag}))
    await asyncio.to_thread(reporter.close)  # tells the last of those that came too early
    messages = await asyncio.to_thread(mq.wait_for, PIPELINES_TOPIC, 2)
    assert [message.keys for message in messages] == [["lake"], ["lake"]]
    told = [json.loads(message.body) for message in messages]
    assert (told[0]["name"], told[0]["kind"], told[0]["timestamp"]) == ("lake", "archive", NOW)
    assert sorted(one["lag"]["orders"] for one in told) == [0, 3]


async def test_a_cluster_that_is_away_does_not_disturb_the_pipeline(caplog: pytest.LogCaptureFixture) -> None:
    reporter = PipelineReporter(ClientConfig(("127.0.0.1:1",), connect_timeout_seconds=0.2), ManualClock(NOW))
    assert not await asyncio.to_thread(reporter.tell, PipelineStatus("lake", "archive"))
    assert "pipeline status not sent" in caplog.text
    await asyncio.to_thread(reporter.close)
