"""Checks 9, 10, 12 and 13: lag that is true, members that differ, the one search box, and the verdict of each group."""

from __future__ import annotations

from pathlib import Path

import pytest

from downrange import Message, ReceivedMessage
from downrange.client.admin import Admin
from tests.browser.conftest import Visits
from tests.browser.test_tasks import verdicts
from tests.support.console_process import console_process
from tests.support.shop_work import member, read_all, send
from tests.support.standalone_process import Standalone
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_09_lag_is_right_and_its_history_outlives_the_console(
    visits: Visits, admin: Admin, cluster: Standalone, tmp_path: Path
) -> None:
    await send(admin, *(Message("half-read", b"read") for _ in range(6)))
    await read_all(admin, "half-read", "half-read")
    await send(admin, *(Message("half-read", b"waits") for _ in range(5)))
    for _ in range(2):  # the second console knows what the first has seen
        with console_process(cluster.namesrv, "--history", str(tmp_path / "console.db")) as console:
            visitor = await visits(console.address)
            await visitor.until("/c/local/groups/half-read", 'p.lead:has-text("5 messages behind")')
            await visitor.until("/c/local/groups/half-read", 'p.lead:has-text("the oldest waits for")')
            assert "-1" not in await visitor.text("p.lead")
            await visitor.until("/c/local/groups/half-read", "#lag tbody tr td.figure")
            rows = await visitor.page.eval_on_selector_all("#lag tbody tr", "all => all.length")
            behind = await visitor.json("/c/local/groups/half-read/chart?range=1h")
    assert rows >= 2
    assert all(one in (None, 5) for one in behind["data"][1])


async def test_10_members_that_subscribe_differently(visitor: Visitor) -> None:
    await visitor.until("/c/local", '#findings a:has-text("Members of mail subscribe to orders differently")')
    await visitor.page.click('#findings a:has-text("Members of mail")')
    await visitor.sees("#differences")
    table = await visitor.text("#differences")
    assert "paid || sent" in table
    assert len(await visitor.page.query_selector_all("#differences tbody tr")) == 2


async def find(visitor: Visitor, text: str) -> str:
    """Where one Enter in the search box leads to."""
    await visitor.opens("/c/local/brokers")
    await visitor.presses("/")
    await visitor.types(text)
    await visitor.presses("Enter")
    await visitor.page.wait_for_url(lambda address: not address.endswith("/brokers"))
    return visitor.path


async def test_12_the_search_box_leads_everywhere_with_one_enter(visitor: Visitor, admin: Admin) -> None:
    (sent,) = await send(admin, Message("found", b"x", keys="a-key-of-its-own"))
    message = f"/c/local/messages/{sent.message_id}?topic=found"
    assert await find(visitor, sent.message_id) == message
    assert await find(visitor, sent.offset_message_id) in (
        message,
        f"/c/local/messages/{sent.offset_message_id}?topic=found",
    )
    assert await find(visitor, "a-key-of-its-own") == message
    assert await find(visitor, "orders") == "/c/local/topics/orders"
    assert await find(visitor, "billing") == "/c/local/groups/billing"
    assert await find(visitor, "%DLQ%billing") == "/c/local/dead-letters/billing"


async def verdict(visitor: Visitor, text: str, group: str) -> str:
    await find(visitor, text)
    return (await verdicts(visitor))[group].split("\n")[0]


async def test_13_the_verdict_of_each_group_is_right(visitor: Visitor, admin: Admin, cluster: Standalone) -> None:
    await visitor.until("/c/local/groups", 'a:text-is("warehouse")')
    assert (await verdict(visitor, "order-3", "search-index")).startswith("consumed")
    assert (await verdict(visitor, "order-3", "mail")).startswith("filtered out")
    assert (await verdict(visitor, "order-3", "fraud")).startswith("filtered out")
    assert (await verdict(visitor, "order-3", "returns")).startswith("being retried")
    assert (await verdict(visitor, "order-3", "warehouse")).startswith("nobody there")
    assert (await verdict(visitor, "broken-3", "billing")).startswith("given up")
    half = (await visitor.json("/c/local/transactions.json"))["rows"][0]["message"]
    assert (await verdict(visitor, half, "warehouse")).startswith("not visible yet")
    (delayed,) = await send(admin, Message("orders", b"later", keys="later", delay_level=18))
    assert (await verdict(visitor, delayed.message_id, "warehouse")).startswith("not visible yet")
    assert (await verdict(visitor, "later", "warehouse")).startswith("not visible yet")


async def test_13_a_message_that_waits_for_its_turn(visitor: Visitor, admin: Admin, cluster: Standalone) -> None:
    *_, last = await send(admin, *(Message("in-line", b"x", keys=f"in-line-{number}") for number in range(3)))

    async def never(message: ReceivedMessage) -> None:
        await visitor.page.wait_for_timeout(60_000)

    async with member(cluster.namesrv, "in-line", "in-line", never):
        path = f"/c/local/messages/{last.message_id}?topic=in-line"
        await visitor.until(path, "#verdicts .state.waiting")
        assert "2 before it" in await visitor.text("#verdicts")
