"""The console in front of genuine brokers of 4.9.8 and 5.3.3: it is given the answers that they once gave."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from downrange.client.config import ClientConfig
from downrange.console.config import ConsoleConfig
from tests.support.captured_server import CAPTURES, captured_server
from tests.support.console import QUICK, Browser, running_console

PAGES = (
    *("", "/topics?kind=all", "/groups", "/messages", "/tail", "/dead-letters", "/delayed", "/transactions"),
    *("/clients", "/brokers", "/brokers/broker-a", "/name-servers", "/pipelines", "/users"),
)


@pytest.fixture(scope="module", params=sorted(CAPTURES))
def genuine(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with captured_server(request.param) as address:
        config = ConsoleConfig({"prod": ClientConfig.of(address)}, port=0, pace=QUICK)
        with running_console(config) as running:
            yield running.browser()


def test_a_genuine_broker_is_understood(genuine: Browser) -> None:
    (broker,) = [
        row
        for row in genuine.until(
            "/c/prod/brokers", lambda data: any(row["state"] == "online" and row["role"] for row in data["rows"])
        )["rows"]
        if row["state"] == "online"
    ]
    assert broker["broker"] == "broker-a"
    assert "MASTER" in broker["role"]
    assert 0 < broker["disk"] < 1
    page = genuine.json("/c/prod/brokers/broker-a")
    assert page["version"].startswith("V")


def test_every_page_of_a_genuine_cluster_is_there(genuine: Browser) -> None:
    genuine.until("/c/prod/groups", lambda data: data["total"] > 0)
    for path in PAGES:
        answer = genuine.get(f"/c/prod{path}")
        assert answer.status == 200, (path, answer.text[-1500:])
        assert "Traceback" not in answer.text
