"""The console in Chinese: the overview, one task, the switch with and without scripts, on wide and narrow screens."""

from __future__ import annotations

import re

import pytest

from tests.browser.conftest import Visits
from tests.browser.test_accessibility import AXE, RULES, scrolls_sideways, violations
from tests.browser.test_tasks import verdicts
from tests.support.console_process import ConsoleProcess
from tests.support.visitor import Visitor

pytestmark = pytest.mark.asyncio(loop_scope="package")

BOXES = """() => {
  const measure = text => { const one = document.createElement("canvas").getContext("2d"); one.font = "40px system-ui";
    one.fillText(text, 0, 40); return [...one.getImageData(0, 0, 40, 50).data].join(); };
  return new Set(["堆", "积", "死", "信"].map(measure)).size;
}"""
"""How many different pictures four characters have: one, if the font has none of them."""


async def reads_well(visitor: Visitor) -> None:
    """The page that is open has no fault for axe, and fits the screen."""
    await visitor.page.evaluate(AXE)
    assert await violations(visitor, type="tag", values=RULES) == []
    assert await scrolls_sideways(visitor) <= 0, visitor.path


@pytest.mark.timeout(180)
@pytest.mark.parametrize("width", [1280, 390])
async def test_the_overview_and_a_task_in_chinese(visits: Visits, console: ConsoleProcess, width: int) -> None:
    visitor = await visits(console.address, width, locale="zh-CN")
    await visitor.until("/c/local", '#findings a:has-text("warehouse 堆积")')
    assert await visitor.page.evaluate("document.documentElement.lang") == "zh-CN"
    assert await visitor.page.evaluate(BOXES) == 4, "scripts/setup installs a font for Chinese"
    assert await visitor.text("h1") == "总览"
    assert re.search(r"warehouse 堆积 [\d,]+ 条（自 [\d: -]+ 起），且没有成员在运行。", await visitor.text("#findings"))
    assert "死信" in await visitor.text(".tiles")
    await visitor.sees("#rates .u-over")
    assert "写入/秒" in await visitor.text("#rates .u-legend")
    assert await visitor.text("#freshness") == "实时 5 秒"
    await reads_well(visitor)

    await visitor.page.click("#find")
    await visitor.types("broken-7")
    await visitor.presses("Enter")
    found = await verdicts(visitor)
    assert found["billing"].startswith("成为死信")
    assert found["search-index"].startswith("已消费")
    assert found["mail"].startswith("被过滤")
    assert found["warehouse"].startswith("无人消费")
    assert "订阅" in await visitor.text("#verdicts")
    await reads_well(visitor)


async def test_the_live_tail_in_chinese(visits: Visits, console: ConsoleProcess) -> None:
    visitor = await visits(console.address, locale="zh-CN")
    await visitor.opens("/c/local/tail?topic=orders")
    await visitor.sees("#tail .line")
    await visitor.sees('#tail-status:has-text("匹配")')
    await visitor.page.click("#pause")
    assert await visitor.text("#pause") == "继续"
    assert "已暂停" in await visitor.text("#tail-status")
    await visitor.page.fill("[name=sql]", "a =")
    await visitor.sees('#sql-hint:has-text("第 4 个字符")')


@pytest.mark.parametrize("has_scripts", [True, False])
async def test_the_switch_changes_the_language_and_keeps_the_choice(
    visits: Visits, console: ConsoleProcess, has_scripts: bool
) -> None:
    visitor = await visits(console.address, java_script_enabled=has_scripts)
    await visitor.opens("/c/local/groups?q=billing")
    assert await visitor.text("h1") == "Groups"
    await visitor.page.click('button:text-is("中文")')
    await visitor.sees('h1:text-is("Group")')
    assert visitor.path == "/c/local/groups?q=billing"
    await visitor.opens("/c/local/dead-letters")
    assert await visitor.text("h1") == "死信"
    await visitor.page.click('button:text-is("English")')
    await visitor.sees('h1:text-is("Dead letters")')
