"""The five tasks of an operator, each with the mouse and with the keyboard alone, in the steps that were promised.

Check 28. A step is a click, or a key (or a text) that leads on; reading is none.
"""

from __future__ import annotations

import re

import pytest

from downrange import Message, ReceivedMessage
from downrange.client.admin import Admin
from downrange.model.topics import retry_topic
from tests.support.console_process import ConsoleProcess
from tests.support.shop_work import member, read_all, send, stored
from tests.support.standalone_process import Standalone
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

BOTH = pytest.mark.parametrize("by", ["mouse", "keyboard"])


async def follow(visitor: Visitor, by: str, selector: str) -> None:
    """One step to what a link or a button leads to."""
    await visitor.sees(selector)
    if by == "mouse":
        await visitor.clicks(selector)
        return
    await visitor.tabs_to(selector)
    visitor.steps.append(f"Enter on {selector}")
    await visitor.presses("Enter")


async def follow_row(visitor: Visitor, by: str, name: str) -> None:
    """One step to what a row of the first table leads to: a click, or `j` until the row is chosen, and Enter."""
    link = f'main .table tbody a:text-is("{name}")'
    await visitor.sees(link)
    if by == "mouse":
        await visitor.clicks(link)
        return
    for _ in range(200):
        await visitor.presses("j")
        if await visitor.page.evaluate("() => document.activeElement.textContent.trim()") == name:
            visitor.steps.append(f"Enter on the row of {name}")
            await visitor.presses("Enter")
            return
    raise AssertionError(f"j does not reach {name}")


async def verdicts(visitor: Visitor) -> dict[str, str]:
    await visitor.sees("#verdicts")
    rows = await visitor.page.eval_on_selector_all(
        "#verdicts tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    return {row[0]: row[1] for row in rows}


@BOTH
async def test_why_is_my_message_not_consumed(visitor: Visitor, by: str) -> None:
    await visitor.until("/c/local/groups", 'a:text-is("warehouse")')
    if by == "mouse":
        await visitor.page.click("#find")
    else:
        await visitor.presses("/")
    visitor.steps.append("paste the key, Enter")
    await visitor.types("broken-7")
    await visitor.presses("Enter")
    found = await verdicts(visitor)
    assert found["billing"].startswith("given up")
    assert found["search-index"].startswith("consumed")
    assert found["mail"].startswith("filtered out")
    assert found["warehouse"].startswith("nobody there")
    assert len(visitor.steps) <= 1, "step 2 of the promise is reading"


@BOTH
async def test_resend_dead_letters_safely(visitor: Visitor, admin: Admin, cluster: Standalone, by: str) -> None:
    group = topic = f"parcels-{by}"
    seen: list[str] = []

    async def take(message: ReceivedMessage) -> None:
        seen.append(message.keys[0])

    async with member(cluster.namesrv, group, topic, take):
        await visitor.until("/c/local/dead-letters", f'a:text-is("{group}")')
        await follow_row(visitor, by, group)
        assert "60 letters" in await visitor.text()
        await follow(visitor, by, "#plan-resend")
        await visitor.sees("#job-words")
        assert "60 letters planned, none sent yet" in await visitor.text("#job-words")
        assert not seen
        await follow(visitor, by, 'button:has-text("Send one as a trial")')
        await visitor.sees("#trial")
        assert await stored(admin, retry_topic(group)) == 1
        for _ in range(40):  # the trial is consumed as soon as the member has it, and the page says so
            if await visitor.page.query_selector("#trial .state.consumed"):
                break
            await visitor.page.wait_for_timeout(250)
            await visitor.page.reload()
        assert await visitor.text("#trial .state") == "consumed"
        await follow(visitor, by, "#send-rest")
        await visitor.sees("#job-state.done")
    assert len(visitor.steps) <= 5, visitor.steps
    assert "60 of 60 letters sent, 0 failed" in await visitor.text("#job-words")
    assert await stored(admin, retry_topic(group)) == 60
    assert len(seen) == len(set(seen)), "no letter was delivered twice"


@BOTH
async def test_who_is_behind_and_since_when(visitor: Visitor, by: str) -> None:
    await visitor.until("/c/local", '#findings a:has-text("warehouse is")')
    row = await visitor.page.inner_text('.table tbody tr:has(a:text-is("warehouse"))')
    assert re.search(r"warehouse\s+[\d,]+.*\d\d:\d\d:\d\d\s+no members", row, re.DOTALL), row
    await follow(
        visitor, by, '#findings a:has-text("warehouse is")' if by == "mouse" else '#findings a[href$="/warehouse"]'
    )
    await visitor.page.wait_for_url("**/groups/warehouse")
    await visitor.sees("#lag .plot")
    assert len(visitor.steps) == 1


@BOTH
async def test_watch_messages_that_match_an_expression(visitor: Visitor, by: str) -> None:
    await visitor.opens("/c/local")
    if by == "mouse":
        await visitor.clicks('nav.side a:has-text("Live tail")')
        await visitor.sees("#tail-form")
        await visitor.page.click("input[name=topic]")
    else:
        visitor.steps.append("g l")
        await visitor.presses("g", "l")
        await visitor.sees("input[name=topic]:focus")
    visitor.steps.append("topic, expression")
    await visitor.types("orders")
    await visitor.presses("Tab", "Tab")
    await visitor.types("amount > 500 AND region = 'e")
    await visitor.sees("#sql-hint.bad")
    assert re.search(r"\d", await visitor.text("#sql-hint")), "the place of the error is told"
    await visitor.types("u'")
    await visitor.sees("#sql-hint.good")
    visitor.steps.append("Enter")
    await visitor.presses("Enter")
    await visitor.sees("#tail .line")
    bodies = await visitor.page.eval_on_selector_all(
        "#tail .line:not([hidden])", "all => all.map(one => one.innerText)"
    )
    assert bodies
    assert all(int(found[1]) > 500 for body in bodies if (found := re.search(r'"amount": (\d+)', body))), bodies
    assert len(visitor.steps) == 3


async def planned(visitor: Visitor) -> list[list[str]]:
    """Queue, offset now and offset then, as the page of a plan shows them."""
    rows = await visitor.page.eval_on_selector_all(
        "#changes tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.innerText.trim()))"
    )
    return sorted([re.findall(r"\d+", row[1])[-1], row[2].replace(",", ""), row[3].replace(",", "")] for row in rows)


@BOTH
async def test_reset_a_group_with_confidence(visitor: Visitor, admin: Admin, console: ConsoleProcess, by: str) -> None:
    topic = group = f"moved-{by}"
    await send(admin, *(Message(topic, b"%d" % number) for number in range(10)))
    await read_all(admin, group, topic)
    await visitor.until(f"/c/local/groups/{group}", f'.table a:text-is("{topic}")')
    await follow(visitor, by, "#move")
    await visitor.sees("#time")
    visitor.steps.append("type the time")
    if by == "mouse":
        await visitor.page.fill("#time", "2020-01-01T00:00:00")
    else:
        await visitor.tabs_to("#time")
        await visitor.types("01012020")
        await visitor.presses("ArrowRight")
        await visitor.types("010101AM")
        assert await visitor.page.input_value("#time") == "2020-01-01T01:01:01"
    await follow(visitor, by, "#plan")
    await visitor.sees("#changes")
    assert "Nothing was done yet" in await visitor.text()
    assert "10" in await visitor.text("section:has(#changes)")
    dry = await admin.offsets.reset(group, topic, 0, dry_run=True)
    expected = sorted(
        [str(one.queue.queue_id), str(one.committed), str(one.target)]
        for moves in dry.done.values()
        for one in moves.moves
    )
    assert await planned(visitor) == expected
    await follow(visitor, by, "#apply")
    await visitor.sees("#outcome .state.done")
    assert len(visitor.steps) <= 5, visitor.steps
    progress = await admin.groups.progress(group, topic)
    assert {queue.consumer_offset for stats in progress.done.values() for queue in stats.offset_table.values()} == {0}


async def test_a_click_into_the_chart_chooses_the_time(visitor: Visitor) -> None:
    await visitor.until("/c/local/groups/warehouse/move", "#lag .u-over")
    chosen = await visitor.page.input_value("#time")
    await visitor.page.click("#lag .u-over", position={"x": 60, "y": 40})
    assert await visitor.page.input_value("#time") != chosen
    assert await visitor.page.evaluate("document.activeElement.id") == "time"


async def test_charts_are_as_wide_as_their_panels(visitor: Visitor) -> None:
    await visitor.until("/c/local", "#rates .u-over")
    await visitor.sees("#rates .u-over")
    width = await visitor.page.evaluate("document.querySelector('#rates .u-over').clientWidth")
    assert width > 800
