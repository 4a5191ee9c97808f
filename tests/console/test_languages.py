"""The language of a page: what the browser asks for, the switch that keeps a choice, and what stays English."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode

import pytest

from downrange import Message
from downrange.client.config import ClientConfig
from downrange.console.config import AccessConfig, ConsoleConfig, LoginKind
from downrange.console.languages import LANGUAGES, Language
from downrange.console.requests import HEADERS
from downrange.console.users_file import Role, add_user
from downrange.testing.embedded import EmbeddedBroker, broker
from tests.support.console import QUICK, Browser, RunningConsole, running_console, token_of
from tests.support.lasting_port import lasting_port

CHINESE = {"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.8"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedBroker]:
    with broker() as running:
        running.create_topic("orders", 2)
        running.producer("shop").send(Message("orders", b'{"order": 1}', "paid", "order-1"))
        yield running


@pytest.fixture(scope="module")
def console(cluster: EmbeddedBroker) -> Iterator[RunningConsole]:
    config = ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=0, pace=QUICK)
    with running_console(config) as running:
        running.browser().until("/c/local/topics/orders", lambda data: data["messages"] == 1)
        yield running


@pytest.fixture
def browser(console: RunningConsole) -> Browser:
    return console.browser()


def test_a_page_is_in_the_language_that_the_browser_asks_for(browser: Browser) -> None:
    english, chinese = browser.get("/c/local"), browser.get("/c/local", CHINESE)
    assert '<html lang="en"' in english.text
    assert "<h1>Overview</h1>" in english.text
    assert '<html lang="zh-CN"' in chinese.text
    assert "<h1>总览</h1>" in chinese.text
    assert english.headers["etag"] != chinese.headers["etag"]
    for page in (english, chinese):
        assert "accept-language" in page.headers["vary"]
        assert "cookie" in page.headers["vary"]
        assert {name: page.headers.get(name) for name in HEADERS} == HEADERS


def test_a_page_that_the_browser_has_in_another_language_is_sent_again(browser: Browser) -> None:
    tag = browser.get("/settings").headers["etag"]
    assert browser.get("/settings", {"If-None-Match": tag}).status == 304
    assert browser.get("/settings", {"If-None-Match": tag, **CHINESE}).status == 200


def test_the_switch_keeps_a_choice_and_comes_back_to_the_page(browser: Browser) -> None:
    page = browser.get("/c/local/topics?kind=all&q=ord")
    assert '<button class="link" name="language" value="zh-CN" lang="zh-CN">中文</button>' in page.text
    back = re.findall(r'name="next" value="([^"]*)"', page.text)[0].replace("&amp;", "&")
    assert back == "/c/local/topics?kind=all&q=ord"
    fields = {"language": "zh-CN", "next": back, "_token": token_of(page.text)}
    answer = browser.post("/language", fields)
    assert (answer.status, answer.location) == (303, back)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("language=zh-CN; ")
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {
        "httponly",
        "max-age=31536000",
        "path=/",
        "samesite=strict",
    }
    chosen = browser.get(back, {"Accept-Language": "en"})
    assert '<html lang="zh-CN"' in chosen.text
    assert 'value="en" lang="en">English</button>' in chosen.text
    browser.post("/language", {**fields, "language": "en"})
    assert '<html lang="en"' in browser.get(back, CHINESE).text


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example/", "/\\evil.example"])
def test_the_switch_leads_nowhere_else(browser: Browser, target: str) -> None:
    fields = {"language": "zh-CN", "next": target, "_token": browser.token()}
    assert browser.post("/language", fields).location == "/"


def test_the_switch_wants_its_token_its_origin_and_a_language(browser: Browser) -> None:
    fields = {"language": "zh-CN", "next": "/", "_token": browser.token()}
    assert browser.post("/language", {**fields, "_token": "wrong"}).status == 403
    assert browser.post("/language", fields, {"Origin": "http://evil.example"}).status == 403
    assert browser.post("/language", {**fields, "language": "<script>"}).status == 400
    assert browser.get("/language").status == 404
    assert "language" not in browser.cookies


def test_behind_https_the_cookie_is_secure(cluster: EmbeddedBroker) -> None:
    access = AccessConfig(public_url="https://console.example/")
    port = lasting_port()  # the address of this console is that of its proxy
    config = ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=port, access=access, pace=QUICK)
    with running_console(config):
        browser = Browser("127.0.0.1", port)
        fields = {"language": "zh-CN", "next": "/", "_token": browser.token()}
        assert "secure" in browser.post("/language", fields).headers["set-cookie"].lower().split("; ")


def test_before_the_login_the_switch_is_there_too(cluster: EmbeddedBroker, tmp_path: Path) -> None:
    users = tmp_path / "users"
    add_user(users, "ada", Role.VIEWER, "secret-of-ada")
    access = AccessConfig(login=LoginKind.FILE, users_file=users)
    config = ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=0, access=access, pace=QUICK)
    with running_console(config) as running:
        browser = running.browser()
        page = browser.get("/login?next=%2Faudit")
        assert "<h1>Log in</h1>" in page.text
        fields = {"language": "zh-CN", "next": "/login?next=%2Faudit", "_token": token_of(page.text)}
        assert browser.post("/language", fields).location == "/login?next=%2Faudit"
        page = browser.get("/login?next=%2Faudit")
        assert "<h1>登录</h1>" in page.text
        assert 'value="/audit"' in page.text
        refused = browser.post("/login", {"name": "ada", "password": "wrong", "next": "/"}, {"Accept": "text/html"})
        assert refused.status == 401
        assert "登录失败：用户名与密码不匹配。" in refused.text


def test_errors_are_in_the_language_of_the_reader(browser: Browser) -> None:
    page = browser.get("/c/local/topics/none", CHINESE)
    assert page.status == 404
    assert "<h1>未找到</h1>" in page.text
    assert "local 中没有 Broker 提供 Topic none" in page.text
    wrong = browser.get("/c/local/messages?topic=orders&sql=a+%3D", CHINESE)
    assert wrong.status == 400
    assert "第 4 个字符：此处应为值或属性，而不是 结尾" in wrong.text
    sent = browser.post("/c/local/new-topic", {"_token": "wrong"}, {**CHINESE, "Accept": "text/html"})
    assert "表单已过期或来自别处；请重新加载页面" in sent.text
    assert 'name="next" value="/"' in sent.text, "a form is no page to come back to"


@pytest.mark.parametrize("path", ["/c/local", "/c/local/topics/orders", "/c/local/brokers", "/settings"])
def test_json_stays_english(browser: Browser, path: str) -> None:
    data = browser.get(f"{path}.json", CHINESE)
    assert data.status == 200
    assert not re.search(r"[\u3000-\u9fff]", data.text)


def test_errors_in_json_commands_and_the_audit_log_stay_english(browser: Browser) -> None:
    missing = browser.get("/c/local/topics/none.json", CHINESE)
    assert missing.json == {"error": "no broker of local serves the topic none"}
    page = browser.get("/c/local/groups", CHINESE)
    assert re.search(r'id="command">downrange group list -n [\d.:]+</code>', page.text)
    browser.post("/c/local/new-topic", {"_token": "wrong"}, CHINESE)
    assert browser.json("/audit")["rows"][0]["details"] == "reason: token missing or wrong"


def test_a_viewer_without_scripts_gets_the_texts_of_scripts_with_the_page(browser: Browser) -> None:
    page = browser.get("/c/local/tail?topic=orders", CHINESE)
    texts = [json.loads(text) for text in _Shown.of(page.text).texts_of_scripts]
    assert texts[0]["live"] == "实时 {seconds} 秒"
    assert texts[1]["match"] == "匹配 {rate}/秒"


# --- every text of a page -----------------------------------------------------------------------------------------


class _Marks(dict[str, str]):
    """A catalogue that puts marks around every sentence: what stands outside them did not go through it.

    A pattern of placeholders alone says nothing itself: its parts are looked at.
    """

    def __bool__(self) -> bool:
        return True

    def get(self, key: str, default: object = None) -> str:
        return f"⟦{key}⟧" if re.search("[A-Za-z]", re.sub(r"\{[^}]*\}", "", key)) else key


class _Marked(Language):
    patterns = _Marks()


class _Shown(HTMLParser):
    """What a reader of a page sees or hears."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[str] = []
        self.text = ""
        self.texts_of_scripts: list[str] = []
        self._inside: list[str] = []

    @classmethod
    def of(cls, html: str) -> _Shown:
        made = cls()
        made.feed(html)
        made.close()
        return made

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("input", "meta", "link", "rect"):
            self._inside.append(tag)
        for name, value in attrs:
            if name in ("aria-label", "title", "placeholder", "alt") and value:
                self.attributes.append(value)
            if name == "data-texts" and value:
                self.texts_of_scripts.append(value)

    def handle_endtag(self, tag: str) -> None:
        self.text += " "
        if tag in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"code", "kbd", "script", "pre"} & set(self._inside):
            self.text += data


def unmarked(text: str) -> str:
    """A text without what is between marks, from the inside out."""
    while (shorter := re.sub(r"⟦[^⟦⟧]*⟧", "", text)) != text:
        text = shorter
    return text


DATA = re.compile(
    r"Downrange|English|中文|local|orders|paid|order-\d+|shop|billing|broker-[a-z]|CSV|JSON|JAVA|PYTHON|V\d\w*|"
    r"ASYNC_MASTER|SYNC_MASTER|[A-Z][A-Z_]*[A-Z]|[0-9A-F]{32}|%(RETRY|DLQ)%\w+|\d+[hd]\b|TBW102|UTC|none|"
    r"amount > 100 AND region = 'eu'|(?:Mi|Ki|Gi)?B\b|Protobuf|hex|text|Latin-1|\d{4}-\d\d-\d\dT[\d:.]+Z"
)
"""Names, figures and words of RocketMQ that are data of these pages."""
PAGES = (
    *("/c/local", "/c/local/topics?kind=topic", "/c/local/topics/orders", "/c/local/topics/orders?tab=send"),
    *("/c/local/topics/orders?tab=settings", "/c/local/new-topic", "/c/local/groups", "/c/local/new-group"),
    *("/c/local/groups/billing", "/c/local/groups/billing?tab=members", "/c/local/groups/billing?tab=subscriptions"),
    *("/c/local/groups/billing/move", "/c/local/messages?topic=orders", "/c/local/messages", "/c/local/tail"),
    *("/c/local/messages?topic=orders&tag=none", "/c/local/messages?topic=orders&sql=%27", "/c/local/at/orders/x/0/0"),
    *("/c/local/tail?topic=orders", "/c/local/dead-letters", "/c/local/dead-letters/billing", "/c/local/delayed"),
    *("/c/local/transactions", "/c/local/clients", "/c/local/brokers", "/c/local/pipelines", "/c/local/users"),
    *("/c/local/pipelines/none", "/c/local/plans/none", "/c/local/jobs/none", "/c/none", "/none", "/settings"),
    *("/find", "/find?q=none", "/c/local/groups/none", "/c/local/brokers/none"),
)


@pytest.mark.parametrize("path", PAGES)
def test_all_that_a_page_says_goes_through_the_catalogue(
    console: RunningConsole, cluster: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    create_billing(console, cluster)
    monkeypatch.setitem(LANGUAGES, "marked", _Marked("marked", "marked"))
    browser = console.browser()
    browser.cookies["language"] = "marked"
    page = browser.get(path)
    assert "⟦" in page.text
    shown = _Shown.of(page.text)
    left = [DATA.sub("", unmarked(text)) for text in (shown.text, *shown.attributes)]
    assert [word for text in left for word in re.findall(r"\S*[A-Za-z]{2}\S*", text)] == []


def create_billing(console: RunningConsole, cluster: EmbeddedBroker) -> None:
    """A group that has read nothing."""
    browser = console.browser()
    if browser.get("/c/local/groups/billing.json").status != 200:
        browser.submit("/c/local/new-group", {"name": "billing", "retry_max_times": "16"}, "/c/local/new-group")
        browser.until("/c/local/groups?" + urlencode({"q": "billing"}), lambda data: data["found"] == 1)
