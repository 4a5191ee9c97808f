"""The pictures of docs/how-to/use-the-console.md. `DOWNRANGE_PICTURES=1` makes them anew."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import SHOP, Visits
from tests.support.console_process import ConsoleProcess, console_process
from tests.support.processes import Running
from tests.support.standalone_process import standalone_process
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "use-the-console.md"
PICTURES = PAGE.parent / "console"
IS_WANTED = os.environ.get("DOWNRANGE_PICTURES") == "1"
HISTORY_SECONDS = 150.0
"""A chart with less than that says little."""


@pytest.fixture
def tidy(tmp_path: Path) -> Iterator[ConsoleProcess]:
    """A console of the shop alone, without what tests left."""
    with standalone_process(tmp_path) as cluster:
        shop = Running(str(SHOP), cluster.namesrv, program=(sys.executable,))
        try:
            shop.wait_for("^ready$")
            with console_process(cluster.namesrv) as console:
                yield console
        finally:
            shop.close()


async def message_address(visitor: Visitor) -> str:
    found = await visitor.json("/find.json?q=order-12")
    return str(found["messages"][0]["address"])


@pytest.mark.skipif(not IS_WANTED, reason="pictures are made when DOWNRANGE_PICTURES=1 asks for them")
@pytest.mark.timeout(400)
async def test_make_the_pictures(visits: Visits, tidy: ConsoleProcess) -> None:
    visitor = await visits(tidy.address, 1280, 860)
    await visitor.until("/c/local", '#findings a:has-text("billing is")', 60)
    await visitor.page.wait_for_timeout(HISTORY_SECONDS * 1000)
    PICTURES.mkdir(exist_ok=True)
    addresses = {
        "overview": "/c/local",
        "topic": "/c/local/topics/orders",
        "group": "/c/local/groups/billing",
        "message": await message_address(visitor),
        "dead-letters": "/c/local/dead-letters/billing",
        "tail": "/c/local/tail?topic=orders&sql=amount%20%3E%20400",
    }
    for name, path in addresses.items():
        await visitor.page.emulate_media(color_scheme="dark" if name == "tail" else "light")
        await visitor.opens(path)
        if name == "tail":
            await visitor.page.wait_for_timeout(7000)
        elif await visitor.page.query_selector("[data-chart]"):
            await visitor.page.wait_for_selector(".u-over")
        await visitor.page.screenshot(path=PICTURES / f"{name}.png")
    chinese = await visits(tidy.address, 1280, 860, locale="zh-CN")
    await chinese.opens("/c/local")
    await chinese.page.wait_for_selector(".u-over")
    await chinese.page.screenshot(path=PICTURES / "overview-chinese.png")


async def test_the_page_has_its_pictures() -> None:
    names = re.findall(r"!\[[^\]]+\]\(console/([\w-]+)\.png\)", PAGE.read_text())
    assert sorted(names) == ["dead-letters", "group", "message", "overview", "overview-chinese", "tail", "topic"]
    for name in names:
        assert (PICTURES / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
