"""Ten thousand topics and a thousand groups, half never connected: lists are quick, and the broker hardly notices."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from pathlib import Path

import pytest

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig
from tests.console.test_processes import browser_of, line_with, process
from tests.support.console import Browser

TOPICS = 10_000
GROUPS = 1_000
PAGES = ("/c/big", "/c/big/topics", "/c/big/topics?q=0123", "/c/big/groups", "/c/big/clients", "/c/big/dead-letters")


async def fill(namesrv: str) -> None:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        gate = asyncio.Semaphore(64)
        (master,) = await admin.session.masters()

        async def topic(number: int) -> None:
            async with gate:
                await admin.topics.create(TopicConfig(f"topic-{number:05d}", 2, 2), broker=master.address)

        async def group(number: int) -> None:
            async with gate:
                name = f"group-{number:04d}"
                await admin.groups.create(SubscriptionGroupConfig(name), broker=master.address)
                if number % 2:
                    queue = MessageQueue(f"topic-{number:05d}", master.name, 0)
                    await admin.offsets.move_queue(name, queue, 0)

        await asyncio.gather(*map(topic, range(TOPICS)))
        await asyncio.gather(*map(group, range(GROUPS)))


def server_millis(browser: Browser, path: str) -> float:
    answer = browser.get(path)
    assert answer.status == 200
    return float(re.findall(r"dur=([\d.]+)", answer.headers["server-timing"])[0])


def processor_share(pid: int, seconds: float = 30.0) -> float:
    """The part of a processor that a process uses, from the nanoseconds that the kernel counts for its threads."""

    def nanoseconds() -> int:
        return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))

    before, began = nanoseconds(), time.monotonic()
    time.sleep(seconds)
    return (nanoseconds() - before) / 1e9 / (time.monotonic() - began)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lists_are_quick_with_ten_thousand_topics(tmp_path: Path) -> None:
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    with process("standalone", "--data", str(tmp_path), *ports) as cluster:
        namesrv = line_with(cluster, "name server").split()[-1]
        asyncio.run(fill(namesrv))
        with process("console", "-n", f"big={namesrv}", "--port", "0") as running:
            browser = browser_of(line_with(running, "console ready on"))
            browser.until("/c/big/topics", lambda data: data["total"] >= TOPICS, 120)
            browser.until("/c/big/groups", lambda data: all(row["members"] is not None for row in data["rows"]), 300)
            for path in PAGES:
                took = [server_millis(browser, path) for _ in range(9)]
                assert statistics.median(took) < 200, (path, took)
            status = Path(f"/proc/{running.pid}/status").read_text()
            kilobytes = int(re.findall(r"VmRSS:\s+(\d+)", status)[0])
            assert kilobytes < 160 * 1024
            watched = processor_share(cluster.pid)
        alone = processor_share(cluster.pid)
        print(f"\nbroker: {watched:.2%} of a processor with the console, {alone:.2%} without it")
        assert watched - alone < 0.01
