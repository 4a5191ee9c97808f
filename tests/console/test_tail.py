"""The live tail: what matches is counted, what is shown is a sample, and streams end."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from downrange import Message
from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.console.config import ConsoleConfig
from downrange.console.tail import TailFilter, tailing
from downrange.model.sql.errors import SqlError
from downrange.testing import EmbeddedBroker
from tests.support.console import QUICK, RunningConsole, running_console


@pytest.fixture
def console(rocketmq: EmbeddedBroker) -> Iterator[RunningConsole]:
    rocketmq.create_topic("orders", 4)
    config = ConsoleConfig({"local": ClientConfig.of(rocketmq.namesrv)}, port=0, pace=QUICK)
    with running_console(config) as running:
        yield running


class Stream:
    """An open stream of events."""

    def __init__(self, running: RunningConsole, path: str) -> None:
        browser = running.browser()
        self._connection = http.client.HTTPConnection(browser.host, browser.port, timeout=30)
        self._connection.request("GET", path)
        self.response = self._connection.getresponse()

    def next(self, name: str) -> Any:
        """The data of the next event of a name."""
        current = ""
        while True:
            line = self.response.readline().decode()
            assert line, "the stream ended"
            if line.startswith("event: "):
                current = line.removeprefix("event: ").strip()
            elif line.startswith("data: ") and current == name:
                return json.loads(line.removeprefix("data: "))

    def close(self) -> None:
        self.response.close()
        self._connection.close()


def send(mq: EmbeddedBroker, count: int) -> None:
    producer = mq.producer()
    for number in range(count):
        producer.send(
            Message("orders", f'{{"n": {number}}}'.encode(), "paid", f"k{number}", properties={"n": str(number)})
        )


def test_what_matches_is_counted_and_shown(console: RunningConsole, rocketmq: EmbeddedBroker) -> None:
    stream = Stream(console, "/c/local/tail/events?topic=orders&sql=n+%3E%3D+10")
    assert stream.response.headers["content-type"].startswith("text/event-stream")
    assert stream.next("open") == {"filtered_here": False}
    send(rocketmq, 40)
    matched, rows = 0, []
    while matched < 30:
        batch = stream.next("batch")
        matched += batch["matched"]
        rows += batch["rows"]
    assert matched == 30
    assert sorted(int(row[5][1:]) for row in rows) == list(range(10, 40))
    assert rows[0][6].startswith('{"n":')
    stream.close()


def test_a_wrong_expression_and_a_missing_topic_are_said(console: RunningConsole) -> None:
    browser = console.browser()
    assert browser.get("/c/local/tail/events?topic=orders&sql=n+%3E").status == 502
    stream = Stream(console, "/c/local/tail/events?topic=not-there")
    assert "not-there" in stream.next("failed")["error"]
    stream.close()


def test_a_fifth_stream_is_refused_and_the_console_ends_with_open_ones(rocketmq: EmbeddedBroker) -> None:
    rocketmq.create_topic("orders", 4)
    config = ConsoleConfig({"local": ClientConfig.of(rocketmq.namesrv)}, port=0, pace=QUICK)
    with running_console(config) as running:
        streams = [Stream(running, "/c/local/tail/events?topic=orders") for _ in range(4)]
        for stream in streams:
            stream.next("open")
        browser = running.browser()
        assert browser.get("/c/local/tail/events?topic=orders").status == 429
        assert "Close one" in browser.get("/c/local/tail?topic=orders").text
        streams.pop().close()
        while "Close one" in browser.get("/c/local/tail?topic=orders").text:
            pass  # until the console has noticed; the time-out of the test is the limit
    for stream in streams:
        stream.close()


async def test_a_tail_filters_here_when_the_broker_cannot(rocketmq: EmbeddedBroker) -> None:
    rocketmq.create_topic("orders", 1)
    async with Session(ClientConfig.of(rocketmq.namesrv)) as session:
        with pytest.raises(SqlError):
            async with tailing(session, TailFilter("orders", sql="n >")):
                pass
        async with tailing(session, TailFilter("orders", tags="paid")) as tail:
            await asyncio.to_thread(send, rocketmq, 120)
            seen, shown = 0, 0
            while seen < 120:
                batch = await tail.batch()
                assert len(batch.messages) <= 50
                seen += batch.matched
                shown += len(batch.messages)
            assert seen == 120
            assert shown <= 120
