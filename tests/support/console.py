"""A running console on a thread of its own, and a browser without a screen: requests, cookies, forms."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from urllib.parse import urlencode, urlsplit

from downrange.console.app import Console, console
from downrange.console.config import ConsoleConfig
from downrange.console.schedule import Pace
from downrange.transport.loop import run

QUICK = Pace(brokers=0.2, seen=0.2, behind=0.2, others=0.5, configs=0.2, share=0.5)
"""Tests do not want to wait; how much a broker is burdened is tested with the schedule itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the console answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def location(self) -> str:
        return self.headers["location"]


@dataclass(slots=True)
class Browser:
    """Keeps cookies, and puts the token of the last page into forms."""

    host: str
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    cookies: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            sent = {**self.headers, **(headers or {})}
            if self.cookies:
                sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            connection.request(method, path, body, sent)
            got = connection.getresponse()
            content = got.read()
            for name, value in got.getheaders():
                if name.lower() == "set-cookie":
                    key, _, rest = value.partition("=")
                    self.cookies[key] = rest.split(";")[0]
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, content)
        finally:
            connection.close()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.request("GET", path, headers=headers)

    def json(self, path: str) -> Any:
        before, mark, query = path.partition("?")
        answer = self.get(f"{before}.json{mark}{query}")
        assert answer.status == 200, answer.text
        return answer.json

    def post(self, path: str, fields: dict[str, str], headers: dict[str, str] | None = None) -> Answer:
        form = {"Content-Type": "application/x-www-form-urlencoded", **(headers or {})}
        return self.request("POST", path, urlencode(fields), form)

    def token(self, path: str = "/settings") -> str:
        """The token of the forms of a page."""
        return token_of(self.get(path).text)

    def submit(self, path: str, fields: dict[str, str], page: str) -> Answer:
        """Send a form of a page."""
        return self.post(path, {**fields, "_token": self.token(page)})

    def until(self, path: str, is_there: Callable[[Any], bool], seconds: float = 30.0) -> Any:
        """Ask for the data of a page until it is as wanted."""
        end = time.monotonic() + seconds
        while True:
            answer = self.get(path.replace("?", ".json?") if "?" in path else f"{path}.json")
            if answer.status == 200 and is_there(answer.json):
                return answer.json
            if time.monotonic() > end:
                raise TimeoutError(f"{path} was not as wanted after {seconds:g} s: {answer.text[:2000]}")
            time.sleep(0.02)


def token_of(html: str) -> str:
    found = re.search(r'name="_token" value="([^"]*)"', html)
    assert found is not None, html[:3000]
    return unescape(found[1])


@dataclass(frozen=True, slots=True)
class RunningConsole:
    """A console that answers."""

    console: Console
    address: str
    loop: asyncio.AbstractEventLoop

    def browser(self, **headers: str) -> Browser:
        parts = urlsplit(self.address)
        assert parts.hostname is not None
        assert parts.port is not None
        return Browser(parts.hostname, parts.port, dict(headers))


@contextmanager
def running_console(config: ConsoleConfig) -> Iterator[RunningConsole]:
    """A console for the length of a block."""
    started: concurrent.futures.Future[RunningConsole] = concurrent.futures.Future()
    stop = asyncio.Event()

    async def serve() -> None:
        async with console(config) as (built, address):
            started.set_result(RunningConsole(built, address, asyncio.get_running_loop()))
            await stop.wait()

    def main() -> None:
        try:
            run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=main, name="console", daemon=True)
    thread.start()
    running = started.result(30)
    try:
        yield running
    finally:
        running.loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive(), "the console did not end"
