"""Checks 21 to 25: plans that are kept, dead letters neither lost nor doubled, and a console that only reads."""

from __future__ import annotations

import asyncio
import csv
import io
import random
import re
import time
from pathlib import Path

import pytest

from downrange import Message, ReceivedMessage
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.client.consumer.pull import PullConsumer
from downrange.model.message import MessageQueue
from downrange.model.topics import retry_topic
from tests.browser.conftest import Visits
from tests.browser.test_accessibility import PAGES
from tests.browser.test_tasks import planned
from tests.support.console_process import console_process
from tests.support.shop_work import give_up, member, read_all, send, stored, until_stored
from tests.support.standalone_process import Standalone, standalone_process
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def plan_reset(visitor: Visitor, group: str, topic: str, way: str = "time") -> None:
    await visitor.opens(f"/c/local/groups/{group}/move")
    await visitor.page.fill("input[name=topic]", topic)
    await visitor.page.check(f"input[name=way][value={way}]")
    await visitor.page.fill("#time", "2020-01-01T00:00:00")
    await visitor.page.click("#plan")
    await visitor.sees("#changes")


async def committed(admin: Admin, group: str, topic: str) -> set[int]:
    progress = await admin.groups.progress(group, topic)
    return {queue.consumer_offset for stats in progress.done.values() for queue in stats.offset_table.values()}


async def test_21_a_running_group_is_reset_as_planned(visitor: Visitor, admin: Admin, cluster: Standalone) -> None:
    await send(admin, *(Message("again", b"%d" % number) for number in range(5)))
    got: list[bytes] = []

    async def take(message: ReceivedMessage) -> None:
        got.append(message.body)

    async with member(cluster.namesrv, "again", "again", take):
        async with asyncio.timeout(60):
            while await committed(admin, "again", "again") != {5}:
                await asyncio.sleep(0.1)
        await visitor.until("/c/local/groups/again", '.table a:text-is("again")')
        await plan_reset(visitor, "again", "again")
        dry = await admin.offsets.reset("again", "again", 0, dry_run=True)
        (moves,) = dry.done.values()
        assert await planned(visitor) == [["0", str(moves.moves[0].committed), str(moves.moves[0].target)]]
        await visitor.page.click("#apply")
        await visitor.sees("#outcome .state.done")
        async with asyncio.timeout(60):
            while len(got) < 10:
                await asyncio.sleep(0.1)


async def test_21_a_plan_is_refused_when_the_group_moved_meanwhile(visitor: Visitor, admin: Admin) -> None:
    await send(admin, *(Message("drifting", b"%d" % number) for number in range(5)))
    await read_all(admin, "drifting", "drifting")
    await visitor.until("/c/local/groups/drifting", '.table a:text-is("drifting")')
    await plan_reset(visitor, "drifting", "drifting")
    async with PullConsumer("drifting", session=admin.session) as other:
        await other.commit(MessageQueue("drifting", "broker-a", 0), 3)
    await visitor.page.click("#apply")
    await visitor.sees("[role=alert]")
    assert "Not carried out" in await visitor.text("[role=alert]")
    assert re.search(r"5.*3", await visitor.text("[role=alert]"))
    assert await committed(admin, "drifting", "drifting") == {3}


async def test_22_what_skips_messages_asks_for_the_name(visitor: Visitor, admin: Admin) -> None:
    await send(admin, *(Message("skipped", b"%d" % number) for number in range(7)))
    await visitor.until("/c/local/groups/skipped", '.table a:text-is("skipped")')
    await plan_reset(visitor, "skipped", "skipped", "end")
    assert re.search(r"\b7\b.*skipped|skips? 7\b|7 messages", await visitor.text()), await visitor.text()
    assert await visitor.page.is_disabled("#apply")
    await visitor.page.fill("#confirm", "skippe")
    assert await visitor.page.is_disabled("#apply")
    await visitor.page.fill("#confirm", "skipped")
    await visitor.page.click("#apply")
    await visitor.sees("#outcome .state.done")
    assert await committed(admin, "skipped", "skipped") == {7}


async def plan_letters(visitor: Visitor, group: str) -> None:
    await visitor.until("/c/local/dead-letters", f'a:text-is("{group}")')
    await visitor.opens(f"/c/local/dead-letters/{group}")
    await visitor.page.click("#plan-resend")
    await visitor.sees("#job-words")


@pytest.mark.slow
async def test_23_500_letters_at_50_a_second_over_the_death_of_the_console(
    visits: Visits, admin: Admin, cluster: Standalone, tmp_path: Path
) -> None:
    group, history = "five-hundred", str(tmp_path / "console.db")
    await give_up(admin, cluster.namesrv, group, group, 500)
    with console_process(cluster.namesrv, "--history", history) as console:
        visitor = await visits(console.address)
        await plan_letters(visitor, group)
        await visitor.page.click('button:has-text("Send one as a trial")')
        await visitor.sees("#trial")
        await visitor.page.click("#send-rest")
        began = time.monotonic()
        await until_stored(admin, retry_topic(group), 250, 30)
        passed = time.monotonic() - began
        assert 4 < passed < 6.5, f"249 letters at 50 a second took {passed:.1f} s"
        job = visitor.path
        console.process.kill()
    with console_process(cluster.namesrv, "--history", history) as console:
        visitor = await visits(console.address)
        await visitor.opens(job)
        await visitor.page.click("#send-rest")
        await visitor.sees("#job-state.done", 60)
        assert "500 of 500 letters sent, 0 failed" in await visitor.text("#job-words")
    assert await stored(admin, retry_topic(group)) == 500


async def test_24_letters_that_cannot_be_sent_are_listed_with_their_reasons(visits: Visits, tmp_path: Path) -> None:
    group = "too-large"
    with standalone_process(tmp_path) as cluster:
        async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
            large = [Message("parcels", random.randbytes(200_000), keys=f"large-{number}") for number in range(3)]
            await give_up(admin, cluster.namesrv, group, "parcels", 47, *large)
        assert cluster.process.stop() == 0
    with (
        standalone_process(tmp_path, {"maxMessageSize": 65536}) as cluster,
        console_process(cluster.namesrv) as console,
    ):
        visitor = await visits(console.address)
        await plan_letters(visitor, group)
        await visitor.page.fill("#rate", "1000")
        await visitor.page.click("#send-rest")
        await visitor.sees("#failures")
        assert "47 of 50 letters sent, 3 failed" in await visitor.text("#job-words")
        assert len(await visitor.page.query_selector_all("#failures tbody tr")) == 3
        reasons = await visitor.page.eval_on_selector_all(
            "#failures td:last-child", "all => all.map(one => one.innerText)"
        )
        assert all(reasons)
        response = await visitor.page.request.get(f"{console.address}{visitor.path}?format=csv")
        rows = list(csv.DictReader(io.StringIO(await response.text())))
        assert len(rows) == 50
        assert sorted(row["state"] for row in rows) == ["failed"] * 3 + ["sent"] * 47


async def test_25_a_console_that_only_reads_has_nothing_that_writes(visits: Visits, shop: Standalone) -> None:
    with console_process(shop.namesrv, "--read-only") as console:
        visitor = await visits(console.address)
        await visitor.until("/c/local/groups", 'a:text-is("billing")')
        for path in PAGES:
            await visitor.opens(path)
            assert await visitor.page.query_selector('form[method=post]:not([action="/language"])') is None, path
            assert await visitor.page.query_selector("text=/^(Move offsets|Send again|Plan .*)$/") is None, path
        assert "read-only" in await visitor.text(".tools")
        for path in ("/c/local/groups/billing/move", "/c/local/topics/orders/send", "/c/local/plans/x/apply"):
            answer = await visitor.page.request.post(console.address + path, form={"_token": "x"})
            assert answer.status == 404, path
        visitor.forget("status of 404")
