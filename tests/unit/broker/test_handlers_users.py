"""Users and ACLs for operators, 3001 to 3010; what 5.3.3 answered is in tests/interop/test_users_replay.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from downrange.auth.user_access_control import ACCOUNT_CODES
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.users import AccountTable
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.sealing import SealError, unseal
from downrange.store.config import BrokerRole
from tests.support.user_requests import UserDesk

CODE = RequestCode
OK, ERROR, REFUSED, WRONG = (
    ResponseCode.SUCCESS,
    ResponseCode.SYSTEM_ERROR,
    ResponseCode.NO_PERMISSION,
    ResponseCode.INVALID_PARAMETER,
)


@pytest.fixture
def desk(tmp_path: Path) -> UserDesk:
    """root (Super), brokers (the brokers' own account), alice (Normal) and boss (Super)."""
    desk = UserDesk(tmp_path)
    for name, kind in (("alice", "Normal"), ("boss", "Super")):
        body = json.dumps({"password": f"{name}Secret", "userType": kind}).encode()
        assert desk.ask(CODE.AUTH_CREATE_USER, {"username": name}, body).code == OK
    return desk


def acl(*entries: tuple[str, str, str], subject: str = "User:alice", policy: str | None = None, ips: str = "") -> bytes:
    rules = [
        {"resource": resource, "actions": actions.split(","), "decision": decision, "sourceIps": ips.split(",")}
        if ips
        else {"resource": resource, "actions": actions.split(","), "decision": decision}
        for resource, actions, decision in entries
    ]
    return json.dumps({"subject": subject, "policies": [{"policyType": policy, "entries": rules}]}).encode()


@pytest.mark.parametrize(
    ("code", "fields", "body", "answer", "remark"),
    [
        (CODE.AUTH_CREATE_USER, {"username": "  "}, b"{}", WRONG, "The username is blank"),
        (CODE.AUTH_CREATE_USER, {}, b"{}", WRONG, "The username is blank"),
        (CODE.AUTH_CREATE_USER, {"username": "eve"}, b"{}", REFUSED, "The password is blank"),
        (CODE.AUTH_CREATE_USER, {"username": "eve"}, b'{"password":" "}', REFUSED, "The password is blank"),
        (CODE.AUTH_CREATE_USER, {"username": "alice"}, b'{"password":"x"}', REFUSED, "The user is existed"),
        (CODE.AUTH_CREATE_USER, {"username": "e\nve"}, b'{"password":"x"}', WRONG, "The username has control"),
        (CODE.AUTH_CREATE_USER, {"username": "e" * 256}, b'{"password":"x"}', WRONG, "The username has more "),
        (
            CODE.AUTH_CREATE_USER, {"username": "eve"}, b'{"password":"x","userStatus":"maybe"}', WRONG,
            "The userStatus 'maybe' is unknown, expected enable or disable",
        ),
        (CODE.AUTH_UPDATE_USER, {"username": "alice"}, b'{"userType":"god"}', WRONG, "The userType 'god' is "),
        (CODE.AUTH_UPDATE_USER, {"username": "nosuch"}, b"{}", REFUSED, "The user is not exist"),
        (CODE.AUTH_UPDATE_USER, {"username": "brokers"}, b'{"password":"x"}', REFUSED, "User:brokers is the "),
        (CODE.AUTH_DELETE_USER, {"username": "brokers"}, b"", REFUSED, "User:brokers is the brokers' own account"),
        (CODE.AUTH_DELETE_USER, {"username": ""}, b"", WRONG, "The username is blank"),
        (CODE.AUTH_GET_USER, {}, b"", WRONG, "The username is blank"),
        (CODE.AUTH_CREATE_ACL, {"subject": "User:alice"}, b"{}", REFUSED, "The policies is empty."),
        (CODE.AUTH_CREATE_ACL, {"subject": "User:alice"}, b"", ERROR, "the body of request 3006 is not the"),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"), subject=""), ERROR, "The subject '' is unknown"),
        (
            CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"), subject="User:nosuch"), REFUSED,
            "The subject of User:nosuch is not exist.",
        ),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Any", "Allow")), REFUSED, "The actions can not be Any."),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub,Nonsense", "Allow")), REFUSED, "The actions is empty. The "),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T*x", "Pub", "Allow")), REFUSED, "The resource is null. The re"),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub", "Perhaps")), REFUSED, "The decision is null or illegal. The"),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"), policy="My"), REFUSED, "The policyType 'My' is"),
        (CODE.AUTH_CREATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"), ips="1.2"), REFUSED, "The source ip is invalid. "),
        (CODE.AUTH_DELETE_ACL, {"subject": "User:alice"}, b"", REFUSED, "The acl is not exist."),
        (CODE.AUTH_DELETE_ACL, {"subject": "User:nosuch"}, b"", REFUSED, "The subject is not exist."),
        (CODE.AUTH_DELETE_ACL, {}, b"", ERROR, "The subject '' is unknown, expected User:NAME"),
        (CODE.AUTH_GET_ACL, {"subject": "User:nosuch"}, b"", REFUSED, "The subject is not exist."),
    ],
)  # fmt: skip
def test_a_wrong_request_says_what_is_wrong_and_changes_nothing(
    desk: UserDesk, code: int, fields: dict[str, str], body: bytes, answer: int, remark: str
) -> None:
    assert desk.access is not None
    before = desk.access.generation
    reply = desk.ask(code, fields, body)
    assert reply.code == answer, reply.remark
    assert (reply.remark or "").startswith(remark), reply.remark
    assert desk.access.generation == before


def test_only_super_users_touch_super_users(desk: UserDesk) -> None:
    cases = [
        (CODE.AUTH_CREATE_USER, "eve", b'{"password":"x","userType":"SUPER"}', ERROR, "create"),
        (CODE.AUTH_UPDATE_USER, "alice", b'{"userType":"super"}', REFUSED, "update"),
        (CODE.AUTH_UPDATE_USER, "boss", b'{"password":"mine"}', REFUSED, "update"),
        (CODE.AUTH_UPDATE_USER, "boss", b'{"userStatus":"disable"}', REFUSED, "update"),
        (CODE.AUTH_DELETE_USER, "boss", b"", REFUSED, "delete"),
    ]
    assert desk.access is not None
    before = desk.access.generation
    for code, name, body, answer, verb in cases:
        reply = desk.ask(code, {"username": name}, body, by="alice")
        assert (reply.code, reply.remark) == (answer, f"The super user can only be {verb} by super user")
    assert desk.access.generation == before
    for code, name, body, _, _ in cases:
        assert desk.ask(code, {"username": name}, body, by="root").code == OK


def test_the_name_in_the_header_counts_not_that_in_the_body(desk: UserDesk) -> None:
    body = b'{"username":"root","password":"x"}'
    assert desk.ask(CODE.AUTH_CREATE_USER, {"username": "eve"}, body).code == OK
    assert desk.access is not None
    assert desk.access.accounts.users["root"].password != "x"  # noqa: S105
    assert "eve" in desk.access.accounts.users


def test_rules_are_merged_shown_filtered_and_deleted(desk: UserDesk) -> None:
    both = acl(("Topic:orders", "get,PUB", "allow"), ("Group:g*", "All", "Deny"))
    assert desk.ask(CODE.AUTH_CREATE_ACL, {"subject": "User:alice"}, both).code == OK
    default = acl(("*", "Get", "Allow"), policy="default", ips="10.0.0.0/8,::1")
    assert desk.ask(CODE.AUTH_UPDATE_ACL, {}, default).code == OK
    assert desk.ask(CODE.AUTH_UPDATE_ACL, {}, acl(("Group:g*", "Sub", "Allow"))).code == OK
    shown = json.loads(desk.ask(CODE.AUTH_GET_ACL, {"subject": "User:alice"}).body_bytes)
    assert shown == {
        "subject": "User:alice",
        "policies": [
            {
                "policyType": "Custom",
                "entries": [
                    {"resource": "Topic:orders", "actions": ["Get", "Pub"], "decision": "Allow"},
                    {"resource": "Group:g*", "actions": ["Sub"], "decision": "Allow"},
                ],
            },
            {
                "policyType": "Default",
                "entries": [
                    {"resource": "*", "actions": ["Get"], "decision": "Allow", "sourceIps": ["10.0.0.0/8", "::1"]}
                ],
            },
        ],
    }
    assert json.loads(desk.ask(CODE.AUTH_LIST_ACL).body_bytes) == [shown]
    assert desk.ask(CODE.AUTH_LIST_ACL, {"subjectFilter": "bob"}).body_bytes == b""
    assert desk.ask(CODE.AUTH_LIST_ACL, {"resourceFilter": "nosuch"}).body_bytes == b""
    (found,) = json.loads(desk.ask(CODE.AUTH_LIST_ACL, {"resourceFilter": "Topic:"}).body_bytes)
    assert [one["resource"] for policy in found["policies"] for one in policy["entries"]] == ["Topic:orders"]

    delete = {"subject": "user:alice", "resource": "topic:orders"}
    assert desk.ask(CODE.AUTH_DELETE_ACL, {**delete, "policyType": "Default"}).code == OK  # not in that policy
    assert json.loads(desk.ask(CODE.AUTH_LIST_ACL).body_bytes) == [shown]
    assert desk.ask(CODE.AUTH_DELETE_ACL, delete).code == OK
    assert b"Topic:orders" not in desk.ask(CODE.AUTH_LIST_ACL).body_bytes
    assert desk.ask(CODE.AUTH_DELETE_ACL, {"subject": "User:alice"}).code == OK
    assert desk.ask(CODE.AUTH_GET_ACL, {"subject": "User:alice"}).body_bytes == b""


def test_passwords_go_in_and_never_come_out(desk: UserDesk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "vErYsEcReT"  # noqa: S105  of nobody
    told = []
    for code in sorted(ACCOUNT_CODES, key=lambda code: (code == CODE.AUTH_DELETE_USER, code)):
        for fields in ({"username": "eve", "subject": "User:eve"}, {"username": "alice"}, {"filter": ""}):
            for body in (
                json.dumps({"username": "eve", "password": secret}).encode(),
                json.dumps({"password": secret, "userType": secret}).encode().replace(b'"}', b""),
                json.dumps({"password": [secret]}).encode(),
                secret.encode(),
                b"",
            ):
                reply = desk.ask(code, fields, body)
                told.append(f"{reply.remark} {dict(reply.ext_fields)} {reply.body_bytes!r}")
    assert any("eve" in text for text in told)
    for text in (*told, caplog.text):
        assert secret not in text
        assert "Secret" not in text


def test_the_brokers_own_account_gets_the_table_sealed(desk: UserDesk) -> None:
    assert desk.ask(CODE.AUTH_UPDATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"))).code == OK
    for by in ("root", "boss", "alice", "nosuch"):
        reply = desk.ask(CODE.AUTH_LIST_USER, {"challenge": "c"}, by=by)
        assert (reply.code, reply.body_bytes) == (REFUSED, b"")
    sealed = desk.ask(CODE.AUTH_LIST_USER, {"challenge": "c"}, by="brokers").body_bytes
    assert b"Secret" not in sealed
    table = decode_body(AccountTable, unseal(sealed, b"innerSecret", "c"))
    assert {user.username: user.password for user in table.users}["alice"] == "aliceSecret"
    assert [one.subject for one in table.acls] == ["User:alice"]
    with pytest.raises(SealError):
        unseal(sealed, b"innerSecret", "another")


def test_without_the_brokers_own_account_nobody_gets_passwords(tmp_path: Path) -> None:
    desk = UserDesk(tmp_path, inner_client_authentication_credentials="")
    assert desk.ask(CODE.AUTH_LIST_USER, {"challenge": "c"}, by="brokers").code == REFUSED


def test_users_survive_a_restart_and_their_file_is_private(tmp_path: Path) -> None:
    desk = UserDesk(tmp_path)
    assert desk.ask(CODE.AUTH_CREATE_USER, {"username": "alice"}, b'{"password":"x"}').code == OK
    assert desk.ask(CODE.AUTH_UPDATE_ACL, {}, acl(("Topic:T", "Pub", "Allow"))).code == OK
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["auth.json"]
    assert files[0].stat().st_mode & 0o777 == 0o600
    again = UserDesk(tmp_path)
    assert again.access is not None
    assert desk.access is not None
    assert again.access.accounts.users == desk.access.accounts.users
    assert again.access.accounts.acls == desk.access.accounts.acls


def test_a_slave_shows_accounts_and_refuses_changes(tmp_path: Path) -> None:
    desk = UserDesk(tmp_path, BrokerRole.SLAVE)
    for code in sorted(ACCOUNT_CODES):
        reply = desk.ask(code, {"username": "root", "subject": "User:root"}, acl(("Topic:T", "Pub", "Allow")))
        is_change = code not in (CODE.AUTH_GET_USER, CODE.AUTH_LIST_USER, CODE.AUTH_GET_ACL, CODE.AUTH_LIST_ACL)
        assert (reply.code == ERROR) == is_change, code
        assert not is_change or "from slave, please execute it from master" in (reply.remark or "")


def test_without_authentication_nobody_can_prepare_users(tmp_path: Path) -> None:
    desk = UserDesk(tmp_path, authentication_enabled=False, authorization_enabled=False)
    for code in sorted(ACCOUNT_CODES):
        reply = desk.ask(code, {"username": "eve", "subject": "User:eve"}, b'{"password":"x"}')
        assert reply.code == REFUSED
        assert reply.remark == "users and ACLs need authenticationEnabled=true in the broker's configuration"
    assert list(tmp_path.rglob("auth.json*")) == []
