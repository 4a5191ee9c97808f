"""Checks 18, 19 and 20: the live tail at full speed, below it, and many tabs at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from downrange.client.admin import Admin
from tests.browser.conftest import Visits
from tests.support.console_process import ConsoleProcess
from tests.support.processes import DOWNRANGE
from tests.support.shop_work import create_topic
from tests.support.standalone_process import Standalone
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

FEEDER = Path(__file__).parents[1] / "support" / "feeder.py"
MEASURE = """() => {
  const seen = {frames: 0, began: performance.now(), longest: 0};
  const frame = () => { seen.frames += 1; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  const note = task => { seen.longest = Math.max(seen.longest, task.duration); };
  new PerformanceObserver(list => list.getEntries().forEach(note)).observe({type: 'longtask', buffered: false});
  window.measured = () => ({rate: seen.frames / (performance.now() - seen.began) * 1000, longest: seen.longest});
}"""

HIDE = """is => {
  Object.defineProperty(document, 'hidden', {value: is, configurable: true});
  document.dispatchEvent(new Event('visibilitychange'));
}"""


class Feeder:
    """A process that sends when it is told to."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def feed(self) -> int:
        """How many messages were sent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"go\n")
        line = await self._process.stdout.readline()
        return int(line.split()[1])


@asynccontextmanager
async def feeder(namesrv: str, topic: str, rate: int, seconds: float) -> AsyncIterator[Feeder]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(FEEDER), namesrv, topic, str(rate), str(seconds)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield Feeder(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_open(visitor: Visitor) -> None:
    """The tail reads from the end of the topic on: what is sent from now on is seen."""
    await visitor.sees("#tail[data-open]")


async def seen(visitor: Visitor, wanted: int, seconds: float = 60) -> int:
    """How many matches the tail has counted, as soon as they are as many as wanted."""
    end = time.monotonic() + seconds
    while True:
        counted = int(await visitor.page.get_attribute("#tail-status", "data-seen") or 0)
        if counted >= wanted or time.monotonic() > end:
            return counted
        await asyncio.sleep(0.2)


@dataclass
class Tasks:
    """The tasks of the page's main thread, in milliseconds: how long each took, and how long it had the processor."""

    took: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)


@asynccontextmanager
async def tasks_of(visitor: Visitor) -> AsyncIterator[Tasks]:
    """The tasks of a block, there when the block has ended. Chromium traces them, with the time of their thread."""
    browser = visitor.page.context.browser
    assert browser is not None
    session = await browser.new_browser_cdp_session()
    events: list[dict[str, Any]] = []
    is_complete = asyncio.Event()
    session.on("Tracing.dataCollected", lambda told: events.extend(told["value"]))
    session.on("Tracing.tracingComplete", lambda told: is_complete.set())
    wanted = {"traceConfig": {"includedCategories": ["toplevel"]}, "transferMode": "ReportEvents"}
    await session.send("Tracing.start", wanted)
    tasks = Tasks()
    try:
        yield tasks
    finally:
        await session.send("Tracing.end")
        await is_complete.wait()
        await session.detach()
    named = [one for one in events if one.get("name") == "thread_name"]
    main = {(one["pid"], one["tid"]) for one in named if one["args"]["name"] == "CrRendererMain"}
    for one in events:
        if (one.get("pid"), one.get("tid")) in main and one.get("ph") == "X" and one["name"].endswith("RunTask"):
            tasks.took.append(one["dur"] / 1000)
            tasks.used.append(one.get("tdur", one["dur"]) / 1000)
    assert tasks.used, "the browser told no task"


async def watch_at_full_speed(visitor: Visitor, namesrv: str, topic: str, seconds: float) -> dict[str, Any]:
    """Frames a second, the longest task, and the growth of the heap while 5,000 messages a second match."""
    await visitor.opens(f"/c/local/tail?topic={topic}")
    await is_open(visitor)
    async with feeder(namesrv, topic, 5000, seconds) as source:
        before = await heap_bytes(visitor)
        await visitor.page.evaluate(MEASURE)
        sent = await source.feed()
    measured: dict[str, Any] = await visitor.page.evaluate("() => window.measured()")
    assert await seen(visitor, sent) == sent, "counts equal what was sent"
    rows = await visitor.page.evaluate("document.querySelectorAll('#tail .line').length")
    assert rows < 200, "only the rows that can be seen are drawn"
    rate, longest, growth = measured["rate"], measured["longest"], await heap_bytes(visitor) - before
    print(f"\ntail: {sent / seconds:,.0f} matches/s, {rate:.0f} frames/s, longest task {longest:.0f} ms")
    print(f"heap: {before / 1e6:.1f} MB and {growth / 1e6:+.1f} MB")
    return {**measured, "sent": sent, "growth": growth}


async def heap_bytes(visitor: Visitor) -> int:
    """What the scripts of the page hold in memory, garbage left out."""
    session = await visitor.page.context.new_cdp_session(visitor.page)
    try:
        await session.send("HeapProfiler.collectGarbage")
        return int((await session.send("Runtime.getHeapUsage"))["usedSize"])
    finally:
        await session.detach()


async def test_18_five_thousand_matches_a_second_are_all_counted_and_few_are_drawn(
    visitor: Visitor, admin: Admin, cluster: Standalone
) -> None:
    await create_topic(admin, "fed", 4)
    await watch_at_full_speed(visitor, cluster.namesrv, "fed", 6)  # how smoothly: the slow test, on a quiet machine
    await visitor.page.click("#pause")
    assert "paused" in await visitor.text("#tail-status")


@pytest.mark.slow
async def test_18_a_minute_at_full_speed(visitor: Visitor, admin: Admin, cluster: Standalone) -> None:
    """A task is judged by the processor time that it used. Beside other work on two processors a task that used 6 ms
    took 396: the machine had taken the processor away. On a quiet machine both are the same."""
    await create_topic(admin, "fed-long", 4)
    async with tasks_of(visitor) as tasks:
        measured = await watch_at_full_speed(visitor, cluster.namesrv, "fed-long", 60)
    print(f"tasks: {len(tasks.used):,}, the longest took {max(tasks.took):.0f} ms and used {max(tasks.used):.0f} ms")
    assert measured["sent"] > 0.9 * 5000 * 60
    assert measured["rate"] >= 50
    assert max(tasks.used) <= 100
    assert measured["growth"] < 10_000_000, "the page keeps 5,000 rows and no more"


async def test_19_below_500_a_second_the_tail_shows_what_consume_gives(
    visitor: Visitor, admin: Admin, cluster: Standalone
) -> None:
    await create_topic(admin, "fed-slowly", 4)
    expression = "even = '1' AND n BETWEEN 100 AND 700"
    await visitor.opens("/c/local/tail?topic=fed-slowly&sql=" + expression.replace(" ", "%20"))
    await is_open(visitor)
    async with feeder(cluster.namesrv, "fed-slowly", 400, 2) as source:
        await source.feed()
    consumed = await asyncio.create_subprocess_exec(
        *(*DOWNRANGE, "consume", "fed-slowly", "--sql", expression, "-n", cluster.namesrv, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await consumed.communicate()
    expected = len(output.splitlines())
    assert expected == 300, errors.decode()
    assert await seen(visitor, expected) == expected
    assert await visitor.page.get_attribute("#tail-status", "data-shown") == str(expected)


async def test_20_a_ninth_tab_loads_while_eight_pages_and_four_tails_are_open(
    visits: Visits, console: ConsoleProcess
) -> None:
    first = await visits(console.address)
    context = first.page.context
    await first.opens("/c/local")
    for _ in range(7):
        tab = await context.new_page()
        await tab.goto(console.cluster())
    for _ in range(4):
        tail = await context.new_page()
        await tail.goto(console.cluster("tail?topic=orders"))
        await tail.wait_for_selector("#tail .line")
    refused = await context.new_page()
    await refused.goto(console.cluster("tail?topic=orders"))
    assert "open in your tabs already" in await refused.inner_text("main")
    ninth = await context.new_page()
    await ninth.goto(console.cluster())  # a tab without a connection would wait until this call gives up


async def test_20_a_hidden_tail_gives_its_connection_back(visitor: Visitor, console: ConsoleProcess) -> None:
    await visitor.opens("/c/local/tail?topic=orders")
    await visitor.sees("#tail .line")
    await visitor.page.evaluate(HIDE, True)
    await visitor.sees("#tail:not([data-open])")
    await visitor.page.evaluate(HIDE, False)
    await visitor.sees("#tail[data-open]")
