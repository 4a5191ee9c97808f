"""Tables are saved soon after a change, or now and then; a disk that refuses is tried again."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from downrange.broker.groups import CommittedOffsets
from downrange.broker.json_file import JsonFile
from downrange.broker.services.housekeeping import save_every, save_soon
from downrange.broker.topics import Topics
from downrange.clock import ManualClock
from downrange.model.message import TopicQueue
from tests.unit.broker.wired import BROKER, WatchedFile


async def test_a_table_is_saved_every_so_often_also_after_a_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = WatchedFile(tmp_path / "config" / "consumerOffset.json")
    offsets = CommittedOffsets(file)
    clock = ManualClock()
    task = asyncio.create_task(save_every(offsets, lambda: 5.0, clock))
    await asyncio.sleep(0)
    (tmp_path / "config").write_bytes(b"in the way")
    offsets.commit("orders", "g", 0, 7)
    await clock.advance(4.9)
    assert "cannot save" not in caplog.text
    await clock.advance(0.1)
    async with asyncio.timeout(30):
        await file.over.wait()
        while "cannot save CommittedOffsets, trying again" not in caplog.text:
            await asyncio.sleep(0)
        (tmp_path / "config").unlink()
        file.over.clear()
        while not file.over.is_set():
            await clock.advance(5)
    assert CommittedOffsets(file).get("orders", "g", 0) == 7
    task.cancel()


async def test_a_new_topic_is_saved_within_a_moment(tmp_path: Path) -> None:
    file = WatchedFile(tmp_path / "topics.json")
    clock = ManualClock()
    topics = Topics(file, BROKER, clock)
    task = asyncio.create_task(save_soon(topics, clock))
    await asyncio.sleep(0)
    topics.ensure("orders", 4)
    async with asyncio.timeout(30):
        while not file.over.is_set():
            await clock.advance(0.05)
    assert "orders" in Topics(file, BROKER, clock)
    task.cancel()


async def test_what_no_thread_had_time_to_save_is_saved_when_the_broker_stops(tmp_path: Path) -> None:
    file, clock = JsonFile(tmp_path / "topics.json"), ManualClock()
    topics = Topics(file, BROKER, clock)
    gate = threading.Event()
    with ThreadPoolExecutor(1) as only_thread, ExitStack() as at_end:
        at_end.callback(gate.set)
        asyncio.get_running_loop().set_default_executor(only_thread)
        only_thread.submit(gate.wait)
        topics.ensure("orders", 4)
        task = asyncio.create_task(save_soon(topics, clock))
        await asyncio.sleep(0)  # the write waits for the thread
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        topics.save()
        assert "orders" in Topics(file, BROKER, clock)


def test_topics_that_only_have_queues_are_taken_in(tmp_path: Path) -> None:
    """What a broker leaves behind that dies between the first message of a new topic and saving the topic."""
    topics = Topics(JsonFile(tmp_path / "topics.json"), BROKER, ManualClock())
    known = topics.ensure("known", 2)
    queues = [TopicQueue("lost", 0), TopicQueue("lost", 5), TopicQueue("known", 7)]
    assert topics.adopt([*queues, TopicQueue("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)]) == ["lost"]
    lost = topics.get("lost")
    assert lost is not None
    assert (lost.read_queue_nums, lost.write_queue_nums, lost.perm) == (6, 6, 6)
    assert topics.get("known") == known
