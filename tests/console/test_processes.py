"""The console as a process: beside a standalone broker, with TLS, with accounts of a cluster, with silent brokers."""

from __future__ import annotations

import asyncio
import http.client
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from downrange import Message
from downrange.client.admin import Admin
from downrange.client.admin.users import UserInfo
from downrange.client.config import ClientConfig
from downrange.client.per_server import PerServer
from downrange.console.config import AccessConfig, ConsoleConfig, LoginKind
from downrange.model.message import MessageQueue
from downrange.model.topics import SubscriptionGroupConfig, TopicConfig, dlq_topic
from downrange.testing import broker
from tests.integration.test_users import ACCESS
from tests.support.broker_client import standalone
from tests.support.certificates import Certificates
from tests.support.console import QUICK, Browser, running_console
from tests.support.user_requests import SECRETS

COMMAND = [sys.executable, "-m", "downrange"]


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A `downrange` command that is ended, however it goes."""
    running = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()


def line_with(running: subprocess.Popen[str], word: str) -> str:
    assert running.stdout is not None
    lines = []
    for line in running.stdout:
        lines.append(line)
        if word in line:
            return line
    raise AssertionError(f"no line with {word}: {lines}")


def browser_of(line: str) -> Browser:
    found = re.search(r"https?://\S+", line)
    assert found is not None, line
    parts = urlsplit(found[0])
    assert parts.hostname is not None
    assert parts.port is not None
    return Browser(parts.hostname, parts.port)


def until_gone(browser: Browser, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            browser.get("/healthz")
        except OSError:
            return
        assert time.monotonic() < end, "the console still answers"
        time.sleep(0.05)


def test_the_console_of_a_standalone_broker_ends_with_it(tmp_path: Path) -> None:
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    arguments = ("standalone", "--data", str(tmp_path), *ports, "--console", "--console-port", "0")
    with process(*arguments) as running:
        browser = browser_of(line_with(running, "  console  "))
        browser.until("/c/local", lambda data: bool(data["brokers"]))
        assert (tmp_path / "console.db").exists()
        os.kill(running.pid, signal.SIGKILL)
        until_gone(browser)


def test_the_console_serves_tls(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certificates")
    cert, key = certificates.server
    config = tmp_path / "tls.properties"
    config.write_text(f"tls.server.certPath={cert}\ntls.server.keyPath={key}\n")
    with process("console", "-n", "127.0.0.1:1", "--port", "0", "--tls-config", str(config)) as running:
        line = line_with(running, "console ready on")
        assert "https://" in line
        port = browser_of(line).port

        def certificate() -> bytes | None:
            trust = ssl.create_default_context(cafile=str(certificates.ca))
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=30)
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.headers["strict-transport-security"]
            assert isinstance(connection.sock, ssl.SSLSocket)
            found = connection.sock.getpeercert(binary_form=True)
            connection.close()
            return found

        first = certificate()
        certificates.renew()
        assert certificate() != first  # a changed certificate is used at once


def test_the_accounts_of_a_standalone_broker_are_those_of_its_name_server_and_its_console(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path / "certificates")
    pairs = {"server": certificates.server, "client": certificates.client}
    lines = [f"tls.{side}.certPath={cert}\ntls.{side}.keyPath={key}" for side, (cert, key) in pairs.items()]
    lines += [f"tls.{side}.trustCertPath={certificates.ca}" for side in pairs]
    lines += ["tls.server.mode=enforcing", "tls.server.need.client.auth=require"]
    lines += ["authenticationEnabled=true", "authorizationEnabled=true"]
    lines += ['initAuthenticationUser={"username":"root","password":"first-words"}', ""]
    conf = tmp_path / "broker.conf"
    conf.write_text("\n".join(lines))
    conf.chmod(0o600)
    ports = ("--namesrv-port", "0", "--broker-port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
    arguments = ("standalone", "--data", str(tmp_path / "data"), *ports, "--console", "--console-port", "0")
    with process(*arguments, "--config", str(conf)) as running:
        namesrv = line_with(running, "name server").split()[-1]
        browser = browser_of(line_with(running, "  console  "))
        trust = ssl.create_default_context(cafile=str(certificates.ca))
        page = http.client.HTTPSConnection("127.0.0.1", browser.port, context=trust, timeout=30)
        page.request("GET", "/c/local")  # people log in, so their browsers need no certificate
        assert (answer := page.getresponse()).status == 303
        assert answer.headers["location"].startswith("/login")
        page.close()

        def asked(secret: str | None, action: Callable[[Admin], Awaitable[PerServer[Any, Any]]]) -> bool:
            """Whether an action of root, signed with this password or not at all, succeeds."""
            tls = certificates.client_config(shows_certificate=True)
            config = ClientConfig((namesrv,), access_key=secret and "root", secret_key=secret, use_tls=True, tls=tls)

            async def ask() -> bool:
                async with Admin(config) as admin:
                    return not (await action(admin)).failed

            return asyncio.run(ask())

        first, second = "first-words", "second-words"

        def wiped(secret: str | None) -> bool:
            return asked(secret, lambda admin: admin.namesrv.wipe_write_perm("broker-a"))

        assert [wiped(secret) for secret in (None, "other-words", first)] == [False, False, True]
        assert asked(first, lambda admin: admin.users.update(UserInfo(username="root", password=second)))
        assert [wiped(secret) for secret in (first, second)] == [False, True]
    assert (tmp_path / "data" / "console-tls.properties").stat().st_mode & 0o077 == 0


def test_wrong_options_are_refused_in_one_line() -> None:
    for arguments, words in (
        (("--bind", "0.0.0.0", "--auth", "acl"), "set --tls-config or --public-url https://…, or add --insecure"),
        (("--bind", "0.0.0.0"), "can be reached from other machines"),
        (("--auth", "file"), "--users"),
        (("--auth", "magic"), "expected none, file, acl, header"),
        (("--mask", "("), "regular expression"),
    ):
        done = subprocess.run([*COMMAND, "console", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_user_is_added_with_a_password_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "users"
    arguments = [*COMMAND, "console", "add-user", "ada", "--users", str(path), "--role", "admin"]
    done = subprocess.run(arguments, input="long enough\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert path.read_text().startswith("ada:admin:scrypt:")


async def test_people_log_in_with_the_accounts_of_the_cluster(tmp_path: Path) -> None:

    async with standalone(tmp_path, broker_options=ACCESS) as running:
        (namesrv,) = running.config.broker.namesrv_addresses
        own = ClientConfig((namesrv,), access_key="root", secret_key=SECRETS["root"])
        clusters = {"local": own, "other": ClientConfig.of("127.0.0.1:1")}
        config = ConsoleConfig(clusters, port=0, access=AccessConfig(LoginKind.ACL), pace=QUICK)

        def look() -> None:
            with running_console(config) as console:
                browser = console.browser()
                wrong = browser.post("/login", {"name": "root", "password": "not the secret"})
                assert wrong.status == 401
                assert SECRETS["root"] not in wrong.text
                right = browser.post("/login", {"name": "root", "password": SECRETS["root"]})
                assert right.status == 303
                data = browser.until("/c/local/users", lambda data: any(row["user"] == "root" for row in data["users"]))
                assert SECRETS["root"] not in str(data)
                for path in ("/c/other", "/c/other/topics", "/c/other/users"):
                    assert browser.get(path).status == 404, "a cluster that does not know the account is not there"
                assert [row["cluster"] for row in browser.json("/index")["rows"]] == ["local"]
                form = {"name": "eve", "password": "eveSecret1", "action": "create", "type": "Normal"}
                assert browser.submit("/c/local/users/put", form, "/c/local/users").status == 303
                rule = {"subject": "eve", "resource": "Topic:orders", "actions": "Pub", "decision": "Allow"}
                assert browser.submit("/c/local/users/put-rule", rule, "/c/local/users").status == 303
                rules = browser.json("/c/local/users")["rules"]
                assert [(row["subject"], row["resource"], row["actions"]) for row in rules] == [
                    ("User:eve", "Topic:orders", "Pub")
                ]
                gone = {"subject": "User:eve", "resource": "Topic:orders"}
                assert browser.submit("/c/local/users/delete-rule", gone, "/c/local/users").status == 303
                assert (
                    browser.submit("/c/local/users/delete", {"user": "eve", "name": "eve"}, "/c/local/users").status
                    == 303
                )
                assert "eveSecret1" not in str(browser.json("/audit"))
                assert browser.submit("/logout", {}, "/c/local/users").status == 303
                assert browser.get("/c/local/users").status == 303

        await asyncio.to_thread(look)


def test_a_cluster_without_access_control_lets_nobody_in() -> None:
    with broker() as cluster:
        access = AccessConfig(LoginKind.ACL)
        config = ConsoleConfig({"local": ClientConfig.of(cluster.namesrv)}, port=0, access=access, pace=QUICK)
        with running_console(config) as console:
            answer = console.browser().post("/login", {"name": "anybody", "password": "anything"})
            assert answer.status == 401
            assert "no access control" in answer.text


PAGES = (
    "",
    "/topics",
    "/topics/orders",
    "/groups",
    "/groups/billing",
    "/messages?topic=orders",
    "/dead-letters",
    "/dead-letters/billing",
    "/delayed",
    "/transactions",
    "/clients",
    "/brokers",
    "/brokers/broker-c",
    "/name-servers",
    "/pipelines",
    "/users",
)
BROKERS = ("broker-a", "broker-b", "broker-c")


@contextmanager
def three_brokers(directory: Path) -> Iterator[tuple[str, int]]:
    """A name server and three brokers as processes: its address, and the process id of broker-c."""
    with ExitStack() as stack:
        names = stack.enter_context(process("namesrv", "--port", "0", "--data", str(directory / "namesrv")))
        found = re.search(r"ready on (\S+)", line_with(names, "ready on"))
        assert found is not None
        namesrv = found[1].rstrip(",")
        options = ("broker", "-n", namesrv, "--port", "0", "--metrics-port", "-1", "--grpc-port", "-1")
        servers = [
            stack.enter_context(process(*options, "--name", name, "--data", str(directory / name))) for name in BROKERS
        ]
        for server in servers:
            line_with(server, "ready on")
        yield namesrv, servers[-1].pid


async def fill_orders(namesrv: str) -> None:
    async with Admin(ClientConfig.of(namesrv)) as admin:
        for topic in ("orders", dlq_topic("billing")):
            await admin.topics.create(TopicConfig(topic, 1, 1), cluster="DefaultCluster")
        await admin.groups.create(SubscriptionGroupConfig("billing"), cluster="DefaultCluster")
        for name in BROKERS:
            await admin.messages.send(Message("orders", b"x", keys=name), name, 0)
            await admin.offsets.move_queue("billing", MessageQueue("orders", name, 0), 0)


def quickest(browser: Browser, path: str) -> tuple[float, str]:
    """The shortest of three times that a page took: a page that waits for a broker waits each time. And its text."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        page = browser.get(path)
        took.append(time.monotonic() - began)
        assert page.status == 200, f"{path}: {page.text[:500]}"
    return min(took), page.text


def test_08_one_of_three_brokers_is_stopped(tmp_path: Path) -> None:
    """All pages come within a second, with what the others tell; figures of the stopped one carry their age."""
    with three_brokers(tmp_path) as (namesrv, pid):
        asyncio.run(fill_orders(namesrv))
        config = ConsoleConfig({"local": ClientConfig.of(namesrv)}, port=0, pace=QUICK)
        with running_console(config) as console:
            browser = console.browser()
            browser.until("/c/local/groups/billing", lambda data: len(data["progress"]) == 3)
            browser.until("/c/local/topics/orders", lambda data: len(data["queues"]) == 3)
            os.kill(pid, signal.SIGSTOP)
            try:
                browser.until("/c/local/brokers", lambda data: data["rows"][2]["state"] == "silent")
                for path in PAGES:
                    seconds, text = quickest(browser, f"/c/local{path}")
                    assert seconds < 1, f"{path} took {seconds:.1f} s"
                    if path not in ("/name-servers", "/pipelines", "/users"):  # this cluster has no accounts to ask for
                        assert "broker-c" in text, path
                    if path in ("/topics", "/topics/orders", "/groups", "/groups/billing"):
                        assert re.search(r"broker-c</strong> could not be asked: .*its figures are of", text), path
                assert "broker-c does not answer" in browser.get("/c/local").text
                data = browser.json("/c/local/groups/billing")
                assert [row["state"] for row in data["progress"] if row["broker"] == "broker-c"] == ["broker silent"]
                found = browser.json("/c/local/messages?topic=orders")
                assert sorted(row["keys"] for row in found["rows"]) == ["broker-a", "broker-b"]
            finally:
                os.kill(pid, signal.SIGCONT)
            browser.until("/c/local/brokers", lambda data: data["rows"][2]["state"] == "online")
            browser.until("/c/local/groups/billing", lambda data: not data["failed"])


PLAIN = """accounts:
- accessKey: root-key
  secretKey: root-secret-1
  admin: true
"""


def test_accounts_of_4x_are_changed(tmp_path: Path) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text(PLAIN)
    file.chmod(0o600)
    with broker({"aclEnable": "true", "aclFile": str(file)}) as cluster:
        own = ClientConfig((cluster.namesrv,), access_key="root-key", secret_key="root-secret-1")  # noqa: S106
        config = ConsoleConfig({"local": own}, port=0, access=AccessConfig(LoginKind.ACL), pace=QUICK)
        with running_console(config) as console:
            browser = console.browser()
            assert browser.post("/login", {"name": "root-key", "password": "root-secret-1"}).status == 303
            data = browser.until("/c/local/users", lambda data: bool(data["files"]))
            assert data["files"][0]["broker"] == "broker-a"
            form = {"key": "shop-key", "secret": "shop-secret", "topic_perm": "PUB"}
            done = browser.submit("/c/local/users/put-account", form, "/c/local/users")
            assert done.status == 303, done.text
            assert "shop-key" in file.read_text()
            gone = browser.submit(
                "/c/local/users/delete-account", {"key": "shop-key", "name": "shop-key"}, "/c/local/users"
            )
            assert gone.status == 303, gone.text
            assert "shop-key" not in file.read_text()
            assert "shop-secret" not in str(browser.json("/audit"))
