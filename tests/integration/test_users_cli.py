"""`downrange user` and `downrange acl`, and mqadmin's names for them, against a real broker with ACL 2.0."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.standalone_process import Standalone, standalone_process
from tests.support.user_requests import INNER, ROOT, SECRETS

DOWNRANGE = (sys.executable, "-m", "downrange")
SETTINGS = {
    "authenticationEnabled": "true",
    "authorizationEnabled": "true",
    "initAuthenticationUser": ROOT,
    "innerClientAuthenticationCredentials": INNER,
}


@pytest.fixture(scope="module")
def mq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone_process(tmp_path_factory.mktemp("mq"), SETTINGS) as running:
        yield running


def run(
    mq: Standalone, *arguments: str, by: str = "root", given: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command that signs as `by`; `given` is its standard input."""
    account = {"ROCKETMQ_ACCESS_KEY": by, "ROCKETMQ_SECRET_KEY": SECRETS.get(by, f"{by}Secret")}
    done = subprocess.run(
        [*DOWNRANGE, *arguments, "-n", mq.namesrv],
        capture_output=True,
        text=True,
        timeout=60,
        input=given or "",
        env={**os.environ, **account, **environment},
        check=False,
    )
    assert "Secret" not in done.stdout + done.stderr
    return done


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_a_user_from_its_making_to_its_end(mq: Standalone, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("shopSecret\n")
    done = run(mq, "user", "create", "shop", "--password-file", str(secret))
    assert (done.returncode, done.stdout.startswith("user shop created on broker-a")) == (0, True), done.stderr
    assert run(mq, "message", "send", "orders", "x", by="shop").returncode == 1

    assert run(mq, "acl", "set", "shop", "Topic:orders,Group:*", "Pub,Get").returncode == 0
    assert run(mq, "acl", "set", "User:shop", "Topic:orders*", "All", "-d", "Deny", "-i", "10.0.0.0/8").returncode == 0
    rules = document(run(mq, "acl", "show", "shop", "--json"))["rules"]
    assert [(rule["resource"], rule["actions"], rule["sourceIps"], rule["decision"]) for rule in rules] == [
        ("Topic:orders", ["Pub", "Get"], None, "Allow"),
        ("Group:*", ["Pub", "Get"], None, "Allow"),
        ("Topic:orders*", ["All"], ["10.0.0.0/8"], "Deny"),
    ]
    assert run(mq, "message", "send", "orders", "x", by="shop").returncode == 0
    listed = run(mq, "acl", "list", "--resource", "Group").stdout.splitlines()
    assert [line.split()[1:4] for line in listed[1:]] == [["User:shop", "Custom", "Group:*"]]

    assert run(mq, "user", "update", "shop", "--status", "disable").returncode == 0
    refused = run(mq, "message", "send", "orders", "x", by="shop")
    assert refused.returncode == 1
    assert "User:shop is disabled." in refused.stderr
    users = document(run(mq, "user", "list", "--filter", "sho", "--json"))["users"]
    assert [(user["username"], user["userType"], user["userStatus"]) for user in users] == [
        ("shop", "Normal", "disable")
    ]
    assert all("password" not in user for user in users)

    assert run(mq, "acl", "delete", "shop", "--resource", "Group:*").returncode == 0
    assert "Group:*" not in run(mq, "acl", "show", "shop").stdout
    assert run(mq, "user", "delete", "shop").returncode == 0
    assert run(mq, "user", "show", "shop").stdout == "there is no user shop\n"


def test_a_password_comes_from_the_environment_or_from_standard_input(mq: Standalone) -> None:
    assert run(mq, "user", "create", "env", ROCKETMQ_USER_PASSWORD="envSecret").returncode == 0  # noqa: S106
    assert run(mq, "user", "create", "input", "--type", "super", given="first\n").returncode == 0
    assert run(mq, "user", "update", "input", "--new-password", given="inputSecret\n").returncode == 0
    for name in ("env", "input"):
        allowed = run(mq, "user", "list", by=name)
        assert allowed.returncode == (0 if name == "input" else 1), allowed.stderr
        assert "check signature failed" not in allowed.stderr
    nothing = run(mq, "user", "create", "nobody")
    assert (nothing.returncode, nothing.stderr) == (2, "downrange: the password is empty\n")
    missing = run(mq, "user", "create", "nobody", "--password-file", "no-such-file")
    assert (missing.returncode, missing.stderr) == (1, "downrange: no-such-file: No such file or directory\n")
    unchanged = run(mq, "user", "update", "env")
    assert unchanged.returncode == 2
    assert "nothing to change" in unchanged.stderr


def test_mqadmin_knows_its_own_names(mq: Standalone) -> None:
    def mqadmin(*line: str) -> subprocess.CompletedProcess[str]:
        return run(mq, "mqadmin", *line)

    where = ("-c", "DefaultCluster")
    for line in (
        ("createUser", *where, "-u", "alice", "-p", "word", "-t", "Normal"),
        ("updateUser", "-b", mq.broker, "-u", "alice", "-s", "disable"),
        ("createAcl", *where, "-s", "User:alice", "-r", "Topic:T,Group:G", "-a", "Pub,Sub", "-i", "::1", "-d", "Allow"),
        ("updateAcl", *where, "-s", "User:alice", "-r", "Topic:T", "-a", "Pub", "-d", "Deny"),
        ("getUser", *where, "-u", "alice"),
        ("listUser", *where, "-f", "ali"),
        ("getAcl", *where, "-s", "User:alice"),
        ("listAcl", *where, "-s", "alice"),
        ("copyAcl", "-f", mq.broker, "-t", mq.broker),
        ("deleteAcl", *where, "-s", "User:alice"),
        ("deleteUser", *where, "-u", "alice"),
    ):
        done = mqadmin(*line)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert done.stdout
    copied = mqadmin("copyUser", "-f", mq.broker, "-t", mq.broker)
    assert copied.returncode == 1
    assert "passwords are for the account of innerClientAuthenticationCredentials only" in copied.stderr


def test_a_wrong_word_is_one_clear_line(mq: Standalone) -> None:
    for line, complaint in (
        (("user", "create", "eve", "--type", "god"), "The userType 'god' is unknown, expected Super or Normal"),
        (("acl", "set", "nosuch", "Topic:T", "Pub"), "The subject of User:nosuch is not exist."),
        (("acl", "set", "root", "Tropic:T", "Pub"), "The resource type 'Tropic' is unknown, expected Cluster or"),
        (("acl", "set", "root", "Topic:T", "Pub,Dance"), "The action 'Dance' is unknown, expected Pub or"),
        (("acl", "set", "root", "Topic:T", "Pub", "-d", "Maybe"), "The decision 'Maybe' is unknown, expected Allow or"),
        (("acl", "delete", "root"), "The acl is not exist."),
    ):
        done = run(mq, *line, given="word\n")
        assert done.returncode == 1
        assert complaint in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_settings_are_shown_without_secrets(mq: Standalone) -> None:
    shown = document(run(mq, "config", "get", "--json"))["brokers"][0]["config"]
    assert shown["initAuthenticationUser"] == shown["innerClientAuthenticationCredentials"] == "******"
    assert shown["authenticationEnabled"] == "true"
    refused = run(mq, "config", "update", "authenticationEnabled=false")
    assert refused.returncode == 1
    assert "authenticationEnabled can not be updated while running" in refused.stderr


def test_the_broker_says_when_others_can_read_its_secrets(tmp_path: Path) -> None:
    with standalone_process(tmp_path, SETTINGS) as running:
        printed = running.process.errors  # before the first line of output
        assert re.search(r"others can read initAuthenticationUser .*in .*: chmod 600 \S*broker.conf", printed)
        assert "Secret" not in printed
