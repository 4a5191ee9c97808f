"""A shop with trouble, its console, and a browser: each started once for all tests of this directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from tests.support.console_process import ConsoleProcess, console_process
from tests.support.processes import Running
from tests.support.shop_work import create_group, create_topic, give_up, read_all
from tests.support.standalone_process import Standalone, standalone_process
from tests.support.visitor import Visitor

BROWSER = "chromium-headless-shell"
SHOP = Path(__file__).parents[2] / "examples" / "shop.py"
STAGED = ("moved-mouse", "moved-keyboard", "half-read", "found", "in-line", "again", "drifting", "skipped", "sleepers")
"""Topics of tests, each with a group of its name that has read everything."""
GIVEN_UP = ("parcels-mouse", "parcels-keyboard")
"""Topics of tests, each with a group of its name that has given up on all messages."""
LETTERS = 60

Visits = Callable[..., Awaitable[Visitor]]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which(BROWSER)
    if path is None and os.environ.get("DOWNRANGE_BROWSER") != "required":
        pytest.skip(f"no {BROWSER} here: scripts/setup installs it")
    assert path is not None, f"{BROWSER} is missing, and DOWNRANGE_BROWSER=required"
    async with async_playwright() as playwright:
        yield await playwright.chromium.launch(executable_path=path)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone_process(tmp_path_factory.mktemp("shop"), {"recallMessageEnable": "true"}) as running:
        yield running


async def stage(namesrv: str) -> None:
    """Topics and groups of tests are there before the console is: it would learn of new ones within 15 seconds."""
    async with Admin(ClientConfig.of(namesrv)) as admin:
        for name in STAGED:
            await create_topic(admin, name, 1)
            await create_group(admin, name)
            await read_all(admin, name, name)
        for name in GIVEN_UP:
            await give_up(admin, namesrv, name, name, LETTERS)


@pytest.fixture(scope="package")
def shop(cluster: Standalone) -> Iterator[Standalone]:
    """The cluster, with the groups, dead letters and waiting messages of examples/shop.py, and the groups of tests."""
    asyncio.run(stage(cluster.namesrv))
    process = Running(str(SHOP), cluster.namesrv, program=(sys.executable,))
    try:
        process.wait_for("^ready$")
        yield cluster
    finally:
        process.close()


@pytest.fixture(scope="package")
def console(shop: Standalone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    history = tmp_path_factory.mktemp("console") / "console.db"
    with console_process(shop.namesrv, "--history", str(history)) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def admin(cluster: Standalone) -> AsyncIterator[Admin]:
    async with Admin(ClientConfig.of(cluster.namesrv)) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="package")
async def visits(browser: Browser) -> AsyncIterator[Visits]:
    """Opens tabs of new browsers; in the end nothing may have gone wrong in any of them."""
    visitors: list[Visitor] = []
    async with AsyncExitStack() as stack:

        async def visit(address: str, width: int = 1280, height: int = 900, **options: Any) -> Visitor:
            settings = {"timezone_id": "UTC", "locale": "en-GB", **options}
            context = await browser.new_context(viewport={"width": width, "height": height}, **settings)
            stack.push_async_callback(context.close)
            visitor = Visitor(await context.new_page(), address)
            visitor.page.set_default_timeout(30_000)
            visitors.append(visitor)
            return visitor

        yield visit
        assert [fault for visitor in visitors for fault in visitor.faults] == []


@pytest_asyncio.fixture(loop_scope="package")
async def visitor(visits: Visits, console: ConsoleProcess) -> Visitor:
    """A tab for the console of the shop."""
    return await visits(console.address)
