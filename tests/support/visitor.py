"""A person in front of a browser: opens pages, and notes everything that should never happen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import ConsoleMessage, Dialog, Error, Page, Response
from playwright.async_api import TimeoutError as NotSeen


@dataclass
class Visitor:
    """One tab. `faults` are dialogs, exceptions of scripts, reports of the content policy and failed requests."""

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._heard)
        self.page.on("pageerror", self._broke)
        self.page.on("dialog", self._asked)

    def _heard(self, message: ConsoleMessage) -> None:
        is_gone = re.search(r"net::ERR_(CONNECTION|INCOMPLETE|EMPTY|NETWORK)", message.text)  # a test ended its console
        if message.type in ("error", "warning") and not is_gone:
            self.faults.append(f"console: {message.text}")

    def _broke(self, error: Error) -> None:
        self.faults.append(f"script: {error}")

    async def _asked(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        await dialog.dismiss()

    def forget(self, pattern: str) -> None:
        """A fault that a test provoked is none; it must have happened."""
        left = [fault for fault in self.faults if not re.search(pattern, fault)]
        assert len(left) < len(self.faults), f"nothing like {pattern!r} in {self.faults}"
        self.faults[:] = left

    async def opens(self, path: str) -> Response:
        response = await self.page.goto(self.base + path)
        assert response is not None
        return response

    @property
    def path(self) -> str:
        """Where the tab is: path and query."""
        parts = urlsplit(self.page.url)
        return parts.path + (f"?{parts.query}" if parts.query else "")

    # --- steps of a task, counted ---------------------------------------------------------------------------------

    async def clicks(self, selector: str) -> None:
        """One step with the mouse."""
        self.steps.append(f"click {selector}")
        await self.page.click(selector)

    async def types(self, text: str) -> None:
        """Part of a step: into what has the focus."""
        await self.page.keyboard.type(text)

    async def presses(self, *keys: str) -> None:
        for key in keys:
            await self.page.keyboard.press(key)

    async def tabs_to(self, selector: str) -> None:
        """Press Tab until the focus is on an element, as people without a mouse do. It must be visible there."""
        wanted = await self.page.wait_for_selector(selector)
        for _ in range(300):
            if await self.page.evaluate("element => element === document.activeElement", wanted):
                shown = await self.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
                assert shown != "none", f"{selector} has the focus, which cannot be seen"
                return
            await self.page.keyboard.press("Tab")
        raise AssertionError(f"{selector} cannot be reached with Tab on {self.path}")

    async def text(self, selector: str = "main") -> str:
        return await self.page.inner_text(selector)

    async def json(self, path: str) -> Any:
        """The data of a page, asked with the cookies of this tab."""
        response = await self.page.request.get(self.base + path)
        assert response.ok, f"{path}: {response.status} {await response.text()}"
        return await response.json()

    async def sees(self, selector: str, seconds: float = 30.0) -> None:
        """Wait until the page that is open has something; what it has instead is in the error."""
        try:
            await self.page.wait_for_selector(selector, timeout=seconds * 1000)
        except NotSeen:
            raise AssertionError(f"no {selector} on {self.path}: {await self.text()}") from None

    async def until(self, path: str, selector: str, seconds: float = 40.0) -> None:
        """Open a page again and again until it has something: the console learns of a change when it asks next."""
        for _ in range(round(seconds * 4)):
            response = await self.opens(path)
            if await self.page.query_selector(selector) is not None:
                return
            if response.status == 404:
                await self.page.wait_for_timeout(250)
                self.forget("status of 404")
                continue
            await self.page.wait_for_timeout(250)
        raise AssertionError(f"{selector} did not come up on {path}: {await self.text()}")
