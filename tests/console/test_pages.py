"""Every address of the console against a real broker: pages, data, headers, roles, tokens."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from downrange import ConsumeFromWhere, Later, Message, PushConsumer
from downrange.cli.main import app
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.consumer.config import ConsumerConfig
from downrange.client.pipeline_status import PipelineReporter, PipelineStatus
from downrange.console.config import AccessConfig, ConsoleConfig, LoginKind
from downrange.console.requests import HEADERS
from downrange.console.users_file import Role, add_user
from downrange.console.views import ADDRESSES
from downrange.testing.embedded import EmbeddedBroker, broker
from tests.support.console import QUICK, Browser, RunningConsole, running_console

HOSTILE = "<script>alert(1)</script>\"'\u202e javascript:x"


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedBroker]:
    """A broker with what an operator looks at: a group behind, dead letters, a delayed message, odd bodies."""
    with broker() as running:
        fill(running)
        yield running


def fill(running: EmbeddedBroker) -> None:
    running.create_topic("orders", 2)
    producer = running.producer("shop", ProducerConfig(trace=True))
    for number in range(40):
        body = json.dumps({"order": number, "card": "4111-1111"}).encode()
        tag = "refused" if number < 5 else "paid"
        producer.send(Message("orders", body, tag, f"order-{number}", properties={"amount": str(number), "ssn": "123"}))
    producer.send(Message("orders", gzip.compress(HOSTILE.encode()), "odd", "odd-1", properties={"name": HOSTILE}))
    producer.send(Message("orders", b"later", "paid", "late-1", delay_level=18))
    give_up_refused(running)


def give_up_refused(running: EmbeddedBroker) -> None:
    """A group that refuses five messages for good."""

    def take(message: object) -> Later | None:
        return Later(delay_level=-1) if getattr(message, "tags", None) == "refused" else None

    with PushConsumer(
        "billing",
        running.namesrv,
        on_message=take,
        config=ConsumerConfig(trace=True, consume_from_where=ConsumeFromWhere.FIRST_OFFSET),
    ) as consumer:
        consumer.subscribe("orders")
        running.wait_for("%DLQ%billing", 5, 30)


def config_of(
    cluster: EmbeddedBroker, access: AccessConfig | None = None, history: Path | None = None
) -> ConsoleConfig:
    return ConsoleConfig(
        {"local": ClientConfig.of(cluster.namesrv)},
        port=0,
        access=access or AccessConfig(),
        history=history,
        pace=QUICK,
    )


@pytest.fixture(scope="module")
def console(cluster: EmbeddedBroker) -> Iterator[RunningConsole]:
    with running_console(config_of(cluster)) as running:
        browser = running.browser()
        browser.until("/c/local/groups", lambda data: {"billing"} <= {row["group"] for row in data["rows"]})
        browser.until("/c/local/groups/billing", lambda data: len(data["progress"]) >= 2)
        browser.until("/c/local/topics/orders", lambda data: data["messages"] == 41)
        yield running


@pytest.fixture
def browser(console: RunningConsole) -> Browser:
    return console.browser()


PAGES = (
    "/c/local",
    "/c/local?all=1&range=24h",
    "/c/local/topics",
    "/c/local/topics?kind=all&q=ord&sort=messages&order=asc",
    "/c/local/topics/orders",
    "/c/local/topics/orders?tab=send",
    "/c/local/topics/orders?tab=settings",
    "/c/local/new-topic",
    "/c/local/topics/%25RETRY%25billing",
    "/c/local/groups",
    "/c/local/new-group",
    "/c/local/groups/billing",
    "/c/local/groups/billing?tab=members",
    "/c/local/groups/billing?tab=subscriptions",
    "/c/local/groups/billing?tab=settings",
    "/c/local/groups/billing/move",
    "/c/local/messages",
    "/c/local/messages?topic=orders",
    "/c/local/messages?topic=orders&tag=paid",
    "/c/local/messages?topic=orders&sql=amount+%3E+30",
    "/c/local/at/orders/broker-a/0/1",
    "/c/local/tail",
    "/c/local/tail?topic=orders&sql=amount+%3E+30",
    "/c/local/dead-letters",
    "/c/local/dead-letters/billing",
    "/c/local/delayed",
    "/c/local/transactions",
    "/c/local/clients",
    "/c/local/brokers",
    "/c/local/brokers/broker-a",
    "/c/local/name-servers",
    "/c/local/pipelines",
    "/c/local/users",
    "/settings",
    "/audit",
    "/find?q=nothing-has-this-name",
)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_answers_with_its_headers_and_its_data(browser: Browser, path: str) -> None:
    page = browser.get(path)
    assert page.status == 200, page.text[:2000]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert {name: page.headers.get(name) for name in HEADERS} == HEADERS
    assert page.text.count("<h1>") == 1
    assert '<html lang="en"' in page.text
    assert "style=" not in page.text
    assert "<script>" not in page.text
    assert float(re.findall(r"dur=([\d.]+)", page.headers["server-timing"])[0]) >= 0
    before, mark, query = path.partition("?")
    data = browser.get(f"{before}.json{mark}{query}")
    assert data.status == 200
    assert isinstance(data.json, dict)


def test_an_unchanged_page_is_sent_once(browser: Browser) -> None:
    first = browser.get("/settings")
    assert browser.get("/settings", {"If-None-Match": first.headers["etag"]}).status == 304
    packed = browser.get("/c/local/topics", {"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert b"<h1>" in gzip.decompress(packed.body)


def test_static_files_are_kept_for_ever(browser: Browser) -> None:
    for name in set(re.findall(r'"(/static/[^"]+)"', browser.get("/c/local").text)):
        got = browser.get(name)
        assert got.status == 200
        assert "immutable" in got.headers["cache-control"]
    assert browser.get("/static/../app.py").status == 404


def test_the_first_load_is_small(browser: Browser) -> None:
    page = browser.get("/c/local", {"Accept-Encoding": "gzip"})
    names = set(re.findall(r'"(/static/[^"]+)"', gzip.decompress(page.body).decode()))
    total = len(page.body) + sum(len(browser.get(name, {"Accept-Encoding": "gzip"}).body) for name in names)
    assert total < 60_000


def test_offsets_are_texts_in_json(browser: Browser) -> None:
    data = browser.json("/c/local/groups/billing")
    assert all(isinstance(row["committed"], str) and isinstance(row["end"], str) for row in data["progress"])


def test_a_consumed_group_is_not_behind(browser: Browser) -> None:
    data = browser.until("/c/local/groups/billing", lambda data: data["behind"] == 0)
    assert data["dead"] == 5


def test_every_page_shows_a_command_that_exists(browser: Browser) -> None:
    top = get_command(app)
    for path in PAGES:
        shown = re.search(r'<code id="command">([^<]*)</code>', browser.get(path).text)
        if shown is None:
            continue
        words = shown[1].replace("&#39;", "'").split()[1:]
        command: Any = top
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", {}), shown[1]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-") and len(word) > 1} <= known, shown[1]


def test_a_pipeline_has_a_chart_of_what_it_reported(browser: Browser, cluster: EmbeddedBroker) -> None:
    reporter = PipelineReporter(cluster.namesrv)
    for behind, error in ((400, "the disk is full"), (40, "the disk was full")):  # one with an error is told at once
        status = PipelineStatus(
            "lake of orders", "archive", "orders", "/lake", {"orders": behind}, 12.5, 900, 0.4, error
        )
        assert reporter.tell(status)
    reporter.close()
    browser.until("/c/local/pipelines", lambda data: [row["behind"] for row in data["rows"]] == [40])
    assert "/c/local/pipelines/lake%20of%20orders" in browser.get("/c/local/pipelines").text
    page = browser.get("/c/local/pipelines/lake%20of%20orders")
    assert page.status == 200, page.text
    assert "the disk was full" in page.text
    assert browser.json("/c/local/pipelines/lake%20of%20orders")["lag"] == [{"topic": "orders", "behind": 40}]
    times, behind, rows = browser.json("/c/local/pipelines/lake%20of%20orders/chart")["data"]
    assert (sorted(times), behind, rows) == (times, [400, 40], [12.5, 12.5])
    assert browser.get("/c/local/pipelines/unheard-of").status == 404


# --- finding and reading messages -------------------------------------------------------------------------------------


def test_the_search_box_leads_to_topics_groups_and_messages(browser: Browser) -> None:
    assert browser.get("/find?q=orders").location == "/c/local/topics/orders"
    assert browser.get("/find?q=billing").location == "/c/local/groups/billing"
    assert browser.get("/find?q=%25DLQ%25billing").location == "/c/local/dead-letters/billing"
    by_key = browser.get("/find?q=order-17").location
    assert by_key.startswith("/c/local/messages/")
    unique_id = by_key.split("/")[-1].split("?")[0]
    assert browser.get(f"/find?q={unique_id}").location == by_key
    offset_id = browser.json(by_key)["offset_id"]
    assert browser.get(f"/find?q={offset_id}").location == by_key
    assert browser.get("/find?q=orders+order-17").location == by_key


def test_the_verdict_of_each_group(browser: Browser) -> None:
    consumed = browser.json(browser.get("/find?q=order-17").location)
    verdicts = {row["group"]: row["verdict"] for row in consumed["verdicts"]}
    assert verdicts["billing"] == "consumed"
    given_up = browser.json(browser.get("/find?q=order-3").location)
    assert {row["group"]: row["verdict"] for row in given_up["verdicts"]}["billing"] == "given up"
    assert consumed["timeline"]["lanes"]


def test_a_body_is_shown_and_not_obeyed(browser: Browser) -> None:
    address = browser.get("/find?q=odd-1").location
    page = browser.get(address).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\u202e" not in page
    assert "⟨U+202E⟩" in page
    assert "gzip" in page


def test_a_body_is_downloaded_as_a_file(browser: Browser) -> None:
    address = browser.get("/find?q=order-17").location
    message_id = address.split("/")[-1].split("?")[0]
    got = browser.get(f"/c/local/body/{message_id}?topic=orders")
    assert got.json["order"] == 17
    assert got.headers["content-type"] == "application/octet-stream"
    assert got.headers["content-disposition"].startswith("attachment")
    assert "sandbox" in got.headers["content-security-policy"]


def test_search_pages_both_ways(browser: Browser) -> None:
    found = browser.json("/c/local/messages?topic=orders&tag=paid")
    assert len(found["rows"]) == 35
    few = browser.json("/c/local/messages?topic=orders&sql=amount+BETWEEN+10+AND+19")
    assert len(few["rows"]) == 10
    text = browser.json("/c/local/messages?topic=orders&text=%22order%22%3A+7%2C")
    assert [row["keys"] for row in text["rows"]] == ["order-7"]


def test_a_wrong_expression_is_refused_with_its_place(browser: Browser) -> None:
    said = browser.get("/c/local/check-sql?sql=amount+%3E").json
    assert "position" in said["error"]
    assert browser.get("/c/local/check-sql?sql=amount+%3E+3").json["error"] is None
    assert browser.get("/c/local/messages?topic=orders&sql=amount+%3E").status == 400
    assert browser.get("/c/local/tail?topic=orders&sql=amount+%3E").status == 400


def test_waiting_messages_are_listed(browser: Browser) -> None:
    data = browser.json("/c/local/delayed")
    assert data["total"] == 1
    assert [row["keys"] for row in data["rows"]] == ["late-1"]


def test_times_are_told_in_the_zone_of_the_browser(browser: Browser) -> None:
    browser.cookies["zone"] = "Asia%2FShanghai"
    assert 'value="Asia/Shanghai"' in browser.get("/settings").text


def test_tables_as_csv(browser: Browser) -> None:
    got = browser.get("/c/local/topics?format=csv")
    assert got.headers["content-type"] == "text/csv; charset=utf-8"
    assert got.text.splitlines()[0].startswith("topic,")
    letters = browser.get("/c/local/dead-letters/billing?format=csv").text.splitlines()
    assert len(letters) == 6


# --- writing ----------------------------------------------------------------------------------------------------------


def test_sending_creating_and_deleting(browser: Browser) -> None:
    made = browser.submit("/c/local/new-topic", {"name": "made-here", "queues": "3"}, "/c/local/new-topic")
    assert made.status == 303
    browser.until("/c/local/topics/made-here", lambda data: len(data["queues"]) == 3)
    sent = browser.submit(
        "/c/local/topics/made-here/send",
        {"body": "hello", "tags": "a", "keys": "k1", "properties": "color=red", "delay": "0"},
        "/c/local/topics/made-here?tab=send",
    )
    assert sent.status == 303, sent.text
    assert browser.json(browser.get("/find?q=k1").location)["properties"]["color"] == "red"

    plan = browser.submit("/c/local/topics/made-here/plan-deletion", {}, "/c/local/topics/made-here?tab=settings")
    assert plan.status == 303, plan.text
    page = browser.get(plan.location)
    assert "1 message" in page.text
    refused = browser.submit(f"{plan.location}/apply", {"name": "wrong"}, plan.location)
    assert refused.status == 400
    done = browser.submit(f"{plan.location}/apply", {"name": "made-here"}, plan.location)
    assert done.status == 303
    assert browser.json(plan.location)["state"] == "done"
    again = browser.post(f"{plan.location}/apply", {"name": "made-here", "_token": browser.token("/c/local/new-topic")})
    assert again.status == 502
    browser.until("/c/local/topics?q=made-here", lambda data: data["found"] == 0)
    audit = browser.json("/audit")["rows"]
    assert {"delete topic", "create topic", "send"} <= {row["action"] for row in audit}


def test_the_form_of_sending_has_what_the_address_says(browser: Browser) -> None:
    empty = browser.get("/c/local/topics/orders?tab=send").text
    assert '<input name="keys" value="">' in empty
    again = browser.get("/c/local/topics/orders?tab=send&keys=k1&tags=paid&body=hello").text
    assert '<input name="keys" value="k1">' in again
    assert '<input name="tags" value="paid">' in again
    assert ">hello</textarea>" in again


def test_a_reset_is_planned_and_refused_when_the_world_moved(browser: Browser, cluster: EmbeddedBroker) -> None:
    form = {"topic": "orders", "way": "time", "time": "2020-01-01T00:00"}
    plan = browser.submit("/c/local/groups/billing/move", form, "/c/local/groups/billing/move")
    assert plan.status == 303, plan.text
    seen = browser.json(plan.location)
    assert not seen["destroys"]
    assert all(change["after"] == "0" for change in seen["changes"])
    other = browser.submit("/c/local/groups/billing/move", form, "/c/local/groups/billing/move")
    assert browser.submit(f"{other.location}/apply", {}, other.location).status == 303
    assert browser.json(other.location)["state"] == "done"
    browser.until("/c/local/groups/billing", lambda data: data["behind"] == 41)
    late = browser.submit(f"{plan.location}/apply", {}, plan.location)
    assert late.status == 303
    refused = browser.json(plan.location)
    assert refused["state"] == "refused"
    assert refused["drifted"]

    skip = browser.submit(
        "/c/local/groups/billing/move", {"topic": "orders", "way": "end"}, "/c/local/groups/billing/move"
    )
    data = browser.json(skip.location)
    assert data["destroys"]
    assert "41 messages will be skipped" in " ".join(data["sentences"])
    assert browser.submit(f"{skip.location}/apply", {"name": "billing"}, skip.location).status == 303
    browser.until("/c/local/groups/billing", lambda data: data["behind"] == 0)


def test_settings_of_groups_and_brokers_are_planned(browser: Browser) -> None:
    page = "/c/local/groups/billing?tab=settings"
    plan = browser.submit(
        "/c/local/groups/billing/plan-settings",
        {"retry_max_times": "7", "retry_queue_nums": "1", "consume_enable": "on", "consume_broadcast_enable": "on"},
        page,
    )
    assert {(one["subject"], one["after"]) for one in browser.json(plan.location)["changes"]} >= {
        ("retryMaxTimes", "7")
    }
    browser.submit(f"{plan.location}/apply", {"name": "billing"}, plan.location)
    assert browser.json(plan.location)["state"] == "done"
    browser.until("/c/local/groups/billing", lambda data: data["settings"]["broker-a"]["retryMaxTimes"] == 7)
    broker_plan = browser.submit(
        "/c/local/brokers/broker-a/plan-settings", {"settings": "fileReservedTime=50"}, "/c/local/brokers/broker-a"
    )
    change = browser.json(broker_plan.location)["changes"][0]
    assert (change["before"], change["after"]) == ("72", "50")
    browser.submit(f"{broker_plan.location}/apply", {}, broker_plan.location)
    assert browser.json(broker_plan.location)["state"] == "done"


# --- who may do what --------------------------------------------------------------------------------------------------


def test_a_write_needs_the_token_and_our_own_page(browser: Browser) -> None:
    path = "/c/local/new-topic"
    token = browser.token(path)
    fields = {"name": "not-made", "queues": "1", "_token": token}
    assert browser.post(path, {"name": "not-made", "queues": "1"}).status == 403
    assert browser.post(path, {**fields, "_token": "x"}).status == 403
    assert browser.post(path, fields, {"Origin": "http://evil.example"}).status == 403
    assert browser.post(path, fields, {"Sec-Fetch-Site": "cross-site"}).status == 403
    refused = [row for row in browser.json("/audit")["rows"] if row["outcome"] == "refused"]
    assert len(refused) >= 4
    assert browser.get(path, {"Host": "evil.example"}).status == 421
    assert browser.get(path, {"Host": f"localhost:{browser.port}"}).status == 200


def test_a_console_that_only_reads_has_no_write_address(cluster: EmbeddedBroker) -> None:
    with running_console(config_of(cluster, AccessConfig(read_only=True))) as running:
        browser = running.browser()
        browser.until("/c/local/groups", lambda data: any(row["group"] == "billing" for row in data["rows"]))
        for row in ADDRESSES:
            if row.writes:
                path = row.path.format(
                    cluster="local",
                    topic="orders",
                    group="billing",
                    plan="x",
                    job="x",
                    id="x",
                    broker="broker-a",
                    pipeline="x",
                )
                assert browser.request(row.method, path).status == 404, path
        for path in PAGES:
            page = browser.get(path)
            forms = set(re.findall(r'method="post" action="([^"]*)"', page.text))
            assert forms == {"/language"}, path  # it changes the browser of the reader, and nothing else


ROLES = {"vera": Role.VIEWER, "otto": Role.OPERATOR, "ada": Role.ADMIN}


def test_roles_by_route(cluster: EmbeddedBroker, tmp_path: Path) -> None:
    users = tmp_path / "users"
    for name, role in ROLES.items():
        add_user(users, name, role, f"{name}-password")
    access = AccessConfig(LoginKind.FILE, users)
    with running_console(config_of(cluster, access)) as running:
        nobody = running.browser()
        assert nobody.get("/c/local/topics").location == "/login?next=%2Fc%2Flocal%2Ftopics"
        assert nobody.get("/c/local/topics.json").status == 401
        assert nobody.get("/healthz").status == 200
        browsers = {name: logged_in(running, name) for name in ROLES}
        browsers["ada"].until("/c/local/topics/orders", lambda data: bool(data["queues"]))
        for row in ADDRESSES:
            if row.is_open or row.path == "/logout" or row.path.endswith("/events"):
                continue
            path = row.path.format(
                cluster="local", topic="orders", group="billing", plan="x", job="x", id="x", broker="broker-a", queue=0,
                offset=1, name="x", pipeline="x",
            )  # fmt: skip
            for name, browser in browsers.items():
                is_refused = browser.request(row.method, path).status == 403
                # Without a token every write is refused; whether the role was the reason stands in the text.
                if row.method == "GET":
                    assert is_refused == (ROLES[name] < row.role), (name, path)
                else:
                    assert is_refused, (name, path)
                    reason = browser.request(row.method, path, headers={"Accept": "application/json"}).text
                    assert ("needs the role" in reason) == (ROLES[name] < row.role), (name, path, reason)


def logged_in(running: RunningConsole, name: str, password: str | None = None) -> Browser:
    browser = running.browser()
    answer = browser.post("/login", {"name": name, "password": password or f"{name}-password", "next": "/settings"})
    assert answer.status == 303, answer.text
    assert answer.location == "/settings"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    return browser


def test_a_viewer_never_gets_a_masked_value(cluster: EmbeddedBroker, tmp_path: Path) -> None:
    users = tmp_path / "users"
    for name, role in ROLES.items():
        add_user(users, name, role, f"{name}-password")
    with running_console(config_of(cluster, AccessConfig(LoginKind.FILE, users, mask="card|ssn"))) as running:
        viewer, operator = logged_in(running, "vera"), logged_in(running, "otto")
        operator.until("/c/local/topics/orders", lambda data: bool(data["queues"]))
        address = operator.get("/find?q=order-17").location
        assert "4111-1111" in operator.get(address).text
        viewer_pages = (address, address + "&view=hex", address + "&view=text", "/c/local/messages?topic=orders")
        for path in (*viewer_pages, "/c/local/dead-letters/billing"):
            before, _, query = path.partition("?")
            for asked in (path, f"{before}.json?{query}"):
                got = viewer.get(asked)
                assert got.status == 200
                assert "4111" not in got.text, asked
                assert "123" not in re.findall(r'"ssn": "([^"]*)"', got.text)
        assert viewer.get("/c/local/messages?topic=orders&sql=ssn+%3D+'123'").status in (400, 403)
        assert "masked" in viewer.get("/c/local/messages?topic=orders&text=4111").text
        message_id = address.split("/")[-1].split("?")[0]
        assert viewer.get(f"/c/local/body/{message_id}?topic=orders").status == 403
        assert viewer.get("/c/local/dead-letters/billing?format=jsonl").status == 403


def test_five_failures_and_a_removed_user(cluster: EmbeddedBroker, tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "vera", Role.VIEWER, "vera-password")
    add_user(users, "otto", Role.OPERATOR, "otto-password")
    with running_console(config_of(cluster, AccessConfig(LoginKind.FILE, users))) as running:
        otto = logged_in(running, "otto")
        guesser = running.browser()
        statuses = [guesser.post("/login", {"name": "vera", "password": "x"}).status for _ in range(6)]
        assert statuses == [401] * 5 + [429]
        assert guesser.post("/login", {"name": "vera", "password": "x", "next": "//evil.example"}).status == 429
        users.write_text("".join(line for line in users.read_text().splitlines(True) if not line.startswith("otto")))
        assert otto.get("/c/local/topics").status == 303


def test_headers_of_a_proxy_are_believed_from_its_address_only(cluster: EmbeddedBroker) -> None:
    access = AccessConfig(LoginKind.HEADER, proxy_addresses=("127.0.0.1",))
    with running_console(config_of(cluster, access)) as running:
        named = running.browser(**{"X-Forwarded-User": "carla", "X-Forwarded-Role": "operator"})
        assert named.json("/settings") | {"name": "carla", "role": "operator"} == named.json("/settings")
        assert running.browser().get("/settings").status == 401
    with running_console(config_of(cluster, AccessConfig(LoginKind.HEADER, proxy_addresses=("10.0.0.1",)))) as running:
        assert running.browser(**{"X-Forwarded-User": "carla"}).get("/settings").status == 401


def test_a_console_starts_without_its_cluster_and_says_so() -> None:
    config = ConsoleConfig({"gone": ClientConfig.of("127.0.0.1:1")}, port=0, pace=QUICK)
    with running_console(config) as running:
        browser = running.browser()
        data = browser.until("/c/gone", lambda data: bool(data["findings"]))
        assert data["error"] is not None
        assert data["findings"][0]["kind"] == "no-namesrv"
        assert "fills in by itself" in browser.get("/c/gone").text


def test_several_clusters_stand_side_by_side(cluster: EmbeddedBroker) -> None:
    clusters = {"one": ClientConfig.of(cluster.namesrv), "two": ClientConfig.of("127.0.0.1:1")}
    with running_console(ConsoleConfig(clusters, port=0, pace=QUICK)) as running:
        data = running.browser().until("/index", lambda data: any(row["topics"] for row in data["rows"]))
        assert {row["cluster"] for row in data["rows"]} == {"one", "two"}


def test_no_bodies_and_no_export(cluster: EmbeddedBroker) -> None:
    access = AccessConfig(show_bodies=False, allow_export=False)
    with running_console(config_of(cluster, access)) as running:
        browser = running.browser()
        browser.until("/c/local/topics/orders", lambda data: bool(data["queues"]))
        address = browser.get("/find?q=order-17").location
        assert "4111" not in browser.get(address).text
        assert browser.get("/c/local/dead-letters/billing?format=csv").status == 403
