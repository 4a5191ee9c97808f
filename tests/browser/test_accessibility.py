"""Checks 29 and 30, and the focus of check 28: axe finds nothing, nothing scrolls sideways, scripts may be off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Visits
from tests.support.console_process import ConsoleProcess
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOURS = ["color-contrast", "link-in-text-block"]
NAVIGATION = (
    "",
    "/topics",
    "/groups",
    "/messages?topic=orders",
    "/tail?topic=orders",
    "/dead-letters",
    "/delayed",
    "/transactions",
    "/clients",
    "/brokers",
    "/name-servers",
    "/pipelines",
    "/users",
)
PAGES = (
    *(f"/c/local{path}" for path in NAVIGATION),
    "/c/local?range=24h",
    "/c/local/messages",
    "/c/local/tail",
    *(f"/c/local/topics/orders?tab={tab}" for tab in ("queues", "groups", "messages", "send", "settings")),
    "/c/local/new-topic",
    "/c/local/new-group",
    "/c/local/groups/billing",
    *(f"/c/local/groups/mail?tab={tab}" for tab in ("members", "subscriptions", "settings")),
    "/c/local/groups/billing/move",
    "/c/local/dead-letters/billing",
    "/c/local/brokers/broker-a",
    "/find?q=or",
    "/settings",
    "/audit",
    "/c/local/topics/there-is-none",
    "/nowhere",
)


async def violations(visitor: Visitor, **only: Any) -> list[str]:
    """What axe has to say about the page that is open."""
    run = "only => axe.run(document, {runOnly: only, resultTypes: ['violations']})"
    found: dict[str, Any] = await visitor.page.evaluate(run, only)
    return [
        f"{visitor.path}: {one['id']}: {one['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:200]}"
        for one in found["violations"]
        for node in one["nodes"][:3]
    ]


async def violations_in_light_and_dark(visitor: Visitor) -> list[str]:
    """Dark differs from light in its colours alone, so that only rules about colours are asked twice."""
    await visitor.page.emulate_media(color_scheme="light", reduced_motion="reduce")
    await visitor.page.evaluate(AXE)
    wrong = await violations(visitor, type="tag", values=RULES)
    await visitor.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    return wrong + [f"dark {one}" for one in await violations(visitor, type="rule", values=COLOURS)]


async def all_pages(visitor: Visitor) -> list[str]:
    """Every page, with one message, one plan and one job of the shop."""
    letters = await visitor.json("/c/local/dead-letters/billing.json")
    row = letters["rows"][0]
    return [*PAGES, f"/c/local/messages/{row['id']}?topic={row['topic']}", row["address"]]


async def scrolls_sideways(visitor: Visitor) -> int:
    return int(await visitor.page.evaluate("document.documentElement.scrollWidth - innerWidth"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [1280, 390])
async def test_29_axe_finds_nothing_and_no_page_scrolls_sideways(
    visits: Visits, console: ConsoleProcess, width: int
) -> None:
    visitor = await visits(console.address, width)
    wrong: list[str] = []
    for path in await all_pages(visitor):
        response = await visitor.opens(path)
        assert response.status < 500, path
        wrong += await violations_in_light_and_dark(visitor)
        if (more := await scrolls_sideways(visitor)) > 0:
            wrong.append(f"{path}: scrolls sideways by {more} px at {width} px")
    visitor.forget("status of 40")  # two of the pages are not there
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize("width", [640, 390])
async def test_29_twice_the_size_loses_nothing(visits: Visits, console: ConsoleProcess, width: int) -> None:
    """640 px are 1280 px at 200 %. What does not fit scrolls in its own box."""
    visitor = await visits(console.address, width, 450)
    for path in await all_pages(visitor):
        await visitor.opens(path)
        assert await scrolls_sideways(visitor) <= 0, path
    visitor.forget("status of 40")


REFRESHED = (
    """() => new Promise(done => document.addEventListener('console:refreshed', () => done(true), {once: true}))"""
)


async def test_28_refreshing_keeps_focus_and_place(visitor: Visitor) -> None:
    await visitor.until("/c/local", '.table a:text-is("warehouse")')
    await visitor.page.focus('.table a:text-is("warehouse")')
    await visitor.page.evaluate("scrollTo(0, 120)")
    for _ in range(2):
        await visitor.page.evaluate(REFRESHED)
        assert await visitor.page.evaluate("document.activeElement.textContent.trim()") == "warehouse"
        assert await visitor.page.evaluate("scrollY") == 120


async def names(visitor: Visitor) -> list[str]:
    """What does not change by itself: the heading, headings of parts, labels, and names in the first column.

    Which groups are behind changes from one moment to the next.
    """
    rows = "main section:not([aria-labelledby=behind-title]) tbody td:first-child > a"
    find = f"main h1, main h2, main label, main .table th, main dt, {rows}"
    texts: list[str] = await visitor.page.eval_on_selector_all(find, "all => all.map(one => one.textContent.trim())")
    return [text for text in texts if not any(letter.isdigit() for letter in text)]


@pytest.mark.parametrize("path", NAVIGATION)
async def test_30_an_address_shows_the_same_in_another_browser_and_without_scripts(
    visits: Visits, console: ConsoleProcess, path: str
) -> None:
    here = await visits(console.address)
    await here.opens(f"/c/local{path}")
    shown = await names(here)
    await here.page.reload()
    assert sorted(await names(here)) == sorted(shown)
    elsewhere = await visits(console.address)
    await elsewhere.opens(here.path)
    assert sorted(await names(elsewhere)) == sorted(shown)
    plain = await visits(console.address, java_script_enabled=False)
    await plain.opens(f"/c/local{path}")
    assert sorted(await names(plain)) == sorted(shown)
    if path == "":
        assert await plain.page.query_selector("#rates details table") is not None, "the chart as a table"
