"""Dead letters that are sent again by a job: trial, rate, pause, and going on after the console was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from downrange import Message
from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.console.config import ConsoleConfig
from downrange.testing import EmbeddedBroker, broker
from tests.support.console import QUICK, Browser, running_console
from tests.support.dead_letters import GROUP, give_up

LETTERS = 30
RETRY = f"%RETRY%{GROUP}"


@pytest.fixture
def cluster() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 2)

        async def fill() -> None:
            async with Session(ClientConfig.of(running.namesrv)) as session:
                messages = [
                    Message("orders", f"body {number}".encode(), "paid", f"k{number}") for number in range(LETTERS)
                ]
                await give_up(running, session, *messages)

        asyncio.run(fill())
        yield running


def console_of(cluster: EmbeddedBroker, history: Path | None = None) -> ConsoleConfig:
    return ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=0, history=history, pace=QUICK)


def planned(browser: Browser, fields: dict[str, str] | None = None) -> str:
    """The address of a job that has not begun."""
    page = f"/c/local/dead-letters/{GROUP}"
    browser.until("/c/local/dead-letters", lambda data: any(row["letters"] == LETTERS for row in data["rows"]))
    answer = browser.submit(f"{page}/plan", fields or {}, page)
    assert answer.status == 303, answer.text
    return answer.location


def test_a_trial_then_the_rest_at_a_rate(cluster: EmbeddedBroker) -> None:
    with running_console(console_of(cluster)) as running:
        browser = running.browser()
        job = planned(browser)
        assert browser.json(job)["words"] == f"{LETTERS} letters planned, none sent yet"
        assert cluster.messages(RETRY) == []
        browser.submit(f"{job}/start", {"trial": "1", "rate": "50"}, job)
        after_trial = browser.until(job, lambda data: data["sent"] == 1 and data["state"] == "paused")
        assert after_trial["left"] == LETTERS - 1
        assert after_trial["trial"]["verdict"]
        began = time.monotonic()
        browser.submit(f"{job}/start", {"rate": "20"}, job)
        browser.until(job, lambda data: data["state"] == "done")
        took = time.monotonic() - began
        assert took >= (LETTERS - 3) / 20
        sent = [message.properties["ORIGIN_MESSAGE_ID"] for message in cluster.messages(RETRY)]
        assert len(sent) == len(set(sent)) == LETTERS
        outcomes = browser.get(f"{job}?format=csv").text.splitlines()
        assert len(outcomes) == LETTERS + 1
        again = browser.submit(f"/c/local/dead-letters/{GROUP}/plan", {"resent": "too"}, "/c/local/new-topic")
        assert again.status == 400
        assert browser.json(f"/c/local/dead-letters/{GROUP}")["found"] == 0
        assert browser.json(f"/c/local/dead-letters/{GROUP}?resent=too")["found"] == LETTERS


def test_narrowing_and_ticking(cluster: EmbeddedBroker) -> None:
    with running_console(console_of(cluster)) as running:
        browser = running.browser()
        assert browser.json(planned(browser, {"text": "body 7"}))["total"] == 1
        rows = browser.json(f"/c/local/dead-letters/{GROUP}")["rows"]
        assert browser.json(planned(browser, {"id": rows[0]["letter"]}))["total"] == 1


def test_pausing_and_stopping(cluster: EmbeddedBroker) -> None:
    with running_console(console_of(cluster)) as running:
        browser = running.browser()
        job = planned(browser)
        browser.submit(f"{job}/start", {"rate": "10"}, job)
        browser.until(job, lambda data: data["sent"] >= 2)
        browser.submit(f"{job}/pause", {}, job)
        paused = browser.json(job)
        assert paused["state"] == "paused"
        assert 0 < paused["left"] < LETTERS
        browser.submit(f"{job}/pause", {"stop": "1"}, job)
        assert browser.json(job)["state"] == "stopped"
        assert browser.post(f"{job}/start", {"_token": browser.token("/c/local/new-topic"), "rate": "1"}).status == 409


def test_events_tell_how_far_a_job_is(cluster: EmbeddedBroker) -> None:
    with running_console(console_of(cluster)) as running:
        browser = running.browser()
        job = planned(browser)
        browser.submit(f"{job}/start", {"rate": "100"}, job)
        events = browser.get(f"{job}/events").text
        last = json.loads(events.strip().split("data: ")[-1])
        assert (last["state"], last["sent"]) == ("done", LETTERS)


def start(cluster: EmbeddedBroker, history: Path) -> tuple[subprocess.Popen[str], Browser]:
    """A console as a process of its own."""
    command = [sys.executable, "-m", "downrange", "console", "-n", f"local={cluster.namesrv}", "--port", "0"]
    process = subprocess.Popen([*command, "--history", str(history)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    parts = urlsplit(process.stdout.readline().removeprefix("console ready on ").strip())
    assert parts.hostname is not None
    assert parts.port is not None
    return process, Browser(parts.hostname, parts.port)


def test_a_killed_console_goes_on_where_it_was(cluster: EmbeddedBroker, tmp_path: Path) -> None:
    history = tmp_path / "history.db"
    process, browser = start(cluster, history)
    try:
        job = planned(browser)
        browser.submit(f"{job}/start", {"rate": "40"}, job)
        browser.until(job, lambda data: data["sent"] >= 5)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    process, browser = start(cluster, history)
    try:
        found = browser.until(job, lambda data: data["state"] == "paused")
        assert "restarted" in found["detail"]
        assert 0 < found["left"] < LETTERS
        browser.submit(f"{job}/start", {"rate": "500"}, job)
        browser.until(job, lambda data: data["state"] == "done")
        sent = [message.properties["ORIGIN_MESSAGE_ID"] for message in cluster.messages(RETRY)]
        assert len(sent) == len(set(sent)) == LETTERS
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


def test_letters_that_cannot_be_sent_are_listed_with_their_reasons(cluster: EmbeddedBroker) -> None:
    """The letters were deleted meanwhile: every one fails, says why, and has its row."""
    with running_console(console_of(cluster)) as running:
        browser = running.browser()
        job = planned(browser)
        plan = browser.submit("/c/local/topics/%25DLQ%25billing/plan-deletion", {}, job)
        assert plan.status == 303, plan.text
        browser.submit(f"{plan.location}/apply", {"name": "%DLQ%billing"}, plan.location)
        assert browser.json(plan.location)["state"] == "done"
        browser.submit(f"{job}/start", {"rate": "1000"}, job)
        data = browser.until(job, lambda data: data["state"] == "done")
        assert (data["sent"], data["failed"]) == (0, LETTERS)
        assert len(data["failures"]) == LETTERS
        assert all(one["reason"] for one in data["failures"])
        assert "failed" in browser.get(job).text
        assert len(browser.get(f"{job}?format=csv").text.splitlines()) == LETTERS + 1
