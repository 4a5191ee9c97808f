"""Members of a group come, go and are killed while messages flow: what the history of it all says."""

from __future__ import annotations

import asyncio
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from downrange import AsyncProducer, Message
from downrange.testing import EmbeddedBroker, broker
from tests.support.history import Event, HistoryWriter, check, load
from tests.support.processes import Running

READER = (sys.executable, "-m", "tests.support.lite_pull_reader")


@pytest.fixture
def mq() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 8)
        yield running


async def produce(mq: EmbeddedBroker, path: Path, name: str, count: int, gate: asyncio.Semaphore) -> None:
    writer = HistoryWriter(path, name)
    async with AsyncProducer(name, mq.namesrv) as producer:
        for number in range(count):
            message_id = f"{name}-{number}"
            body = message_id.encode()
            known = {"topic": "orders", "id": message_id, "crc": zlib.crc32(body) & 0x7FFFFFFF}
            writer.write("send", "invoke", **known)
            result = await producer.send(Message("orders", body))
            queue = f"{result.queue.broker_name}/{result.queue.queue_id}"
            writer.write("send", "ok", **known, queue=queue, offset=result.queue_offset)
            gate.release()
    writer.close()


@pytest.mark.parametrize(
    "count", [pytest.param(4_000, id="4k"), pytest.param(100_000, id="100k", marks=pytest.mark.slow)]
)
async def test_nothing_is_lost_and_little_repeated(mq: EmbeddedBroker, tmp_path: Path, count: int) -> None:
    producers = [f"p{number}" for number in range(4)]
    sent = asyncio.Semaphore(0)
    with ExitStack() as stack:

        async def join(name: str) -> Running:
            arguments = (mq.namesrv, "readers", "orders", str(tmp_path / f"{name}.jsonl"), name)
            reader = Running(*arguments, program=READER)
            stack.callback(reader.close)
            await asyncio.to_thread(reader.wait_for, "reading")
            return reader

        async def after(messages: int) -> None:
            for _ in range(messages):
                await sent.acquire()

        readers = [await join("c1")]
        flow = asyncio.gather(*(produce(mq, tmp_path / f"{name}.jsonl", name, count // 4, sent) for name in producers))
        await after(count // 8)
        readers += [await join("c2"), await join("c3")]
        await after(count // 8)
        readers[0].kill()
        await after(count // 8)
        readers.append(await join("c4"))
        readers[1].signal(signal.SIGTERM)
        assert await asyncio.to_thread(readers[1].wait) == 0
        await flow
        await until_all_read(tmp_path, count)
        for reader in readers[2:]:
            assert await asyncio.to_thread(reader.stop) == 0
    events = history(tmp_path, "*")
    report = check(events)
    print(report)
    assert report.faults == [], str(report)
    assert report.sends == count
    # A killed reader leaves up to five seconds of reading uncommitted. A queue that changes hands is read twice for as
    # long as it takes its last reader to hear of it, which on a busy machine is long enough for more than a batch.
    by_the_killed = {event.id for event in events if event.process == "c1"}
    repeated = Counter(event.id for event in events if event.op == "read" and event.id not in by_the_killed)
    assert sum(times - 1 for times in repeated.values()) <= max(20 * 32, count // 20)


def history(directory: Path, names: str) -> list[Event]:
    return load(*directory.glob(f"{names}.jsonl"))


async def until_all_read(directory: Path, count: int) -> None:
    async with asyncio.timeout(100):
        while len({event.id for event in await asyncio.to_thread(history, directory, "c*")}) < count:
            await asyncio.sleep(0.1)
