"""Who signed a request, and may they: ACL 2.0 with the words of 5.3.3."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from downrange.auth.access_control import ANY_NAME, Account, Action, Need, ResourceType
from downrange.auth.account_table import acl_of
from downrange.auth.accounts import Accounts
from downrange.auth.user_access_control import ACCOUNT_CODES, AccessSettings, UserAccessControl
from downrange.auth.users import AccessRuleError, User, UserStatus, UserType
from downrange.protocol.bodies.users import AclInfo, PolicyEntryInfo, PolicyInfo
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import NoPermission
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer, is_signed_with, signature

HERE = "127.0.0.1"
PUB = frozenset({Action.PUB})
GET = frozenset({Action.GET})
SEND = RequestCode.SEND_MESSAGE_V2


def rule(resource: str, actions: str, decision: str = "Allow") -> PolicyEntryInfo:
    return PolicyEntryInfo(resource=resource, actions=tuple(actions.split(",")), decision=decision)


def rules(name: str, *entries: PolicyEntryInfo) -> AclInfo:
    return AclInfo(subject=f"User:{name}", policies=(PolicyInfo(entries=entries),))


def control(settings: AccessSettings | None = None) -> UserAccessControl:
    accounts = Accounts()
    accounts.replace_all(
        [
            User("root", "rootSecret", UserType.SUPER),
            User("alice", "aliceSecret"),
            User("nobody", "nobodySecret"),
            User("gone", "goneSecret", user_status=UserStatus.DISABLE),
        ],
        [
            acl_of(
                rules(
                    "alice", rule("Topic:orders", "Pub"), rule("Cluster:Blue", "Get"), rule("Topic:x*", "All", "Deny")
                )
            )
        ],
    )
    return UserAccessControl(accounts, settings or AccessSettings("Blue"))


def signed(name: str, secret: str, code: int = SEND, fields: Mapping[str, str] = {}, body: bytes = b"body") -> Command:
    return Signer(name, secret).sign(request(code, ext_fields=fields, body=body))


def changed(command: Command, fields: Mapping[str, str | None] = {}, body: bytes | None = None) -> Command:
    """The request with other fields, None for none, or another body, and the signature it had."""
    ext = {name: value for name, value in {**command.ext_fields, **fields}.items() if value is not None}
    return msgspec.structs.replace(command, raw_ext=ext, body=command.body if body is None else body)


def refusal(access: UserAccessControl, command: Command) -> str:
    with pytest.raises(NoPermission) as caught:
        access.authenticate(command, HERE)
    return caught.value.remark


def test_a_signature_tells_the_account() -> None:
    assert control().authenticate(signed("alice", "aliceSecret"), HERE) == Account("alice")
    assert control().authenticate(signed("root", "rootSecret"), HERE) == Account("root", is_admin=True)


GOOD = signed("alice", "aliceSecret", fields={"b": "orders", "c": "x"})


@pytest.mark.parametrize(
    ("command", "remark"),
    [
        (request(SEND), "username cannot be null."),
        (request(SEND, ext_fields={"b": "T"}), "username cannot be null."),
        (changed(GOOD, {ACCESS_KEY: ""}), "username cannot be null."),
        (changed(GOOD, {ACCESS_KEY: None, "accesskey": "alice"}), "username cannot be null."),
        (signed("nosuch", "x"), "User:nosuch is not found."),
        (signed("Alice", "aliceSecret"), "User:Alice is not found."),
        (signed("alice ", "aliceSecret"), "User:alice  is not found."),
        (signed("x" * 3000, "x"), f"User:{'x' * 255} is not found."),
        (signed("eve\n2026 INFO login", "x"), "User:eve?2026 INFO login is not found."),
        (signed("gone", "goneSecret"), "User:gone is disabled."),
        (signed("gone", "wrong"), "User:gone is disabled."),
        (signed("alice", "wrong"), "check signature failed."),
        (signed("alice", "rootSecret"), "check signature failed."),
        (changed(GOOD, {SIGNATURE: None}), "check signature failed."),
        (changed(GOOD, {SIGNATURE: ""}), "check signature failed."),
        (changed(GOOD, {SIGNATURE: "ä€"}), "check signature failed."),
        (changed(GOOD, {SIGNATURE: GOOD.ext_fields[SIGNATURE] + "="}), "check signature failed."),
        (changed(GOOD, {SIGNATURE: GOOD.ext_fields[SIGNATURE].lower()}), "check signature failed."),
        (changed(GOOD, {"b": "other"}), "check signature failed."),
        (changed(GOOD, {"added": "x"}), "check signature failed."),
        (changed(GOOD, {"c": None}), "check signature failed."),
        (changed(GOOD, body=b"other"), "check signature failed."),
        (changed(GOOD, body=b""), "check signature failed."),
    ],
)
def test_a_request_without_a_right_signature_is_refused_in_the_words_of_5_3_3(command: Command, remark: str) -> None:
    assert refusal(control(), command) == remark


def test_a_query_may_be_signed_with_and_without_its_flag() -> None:
    """Clients up to 4.9.3 and ours sign it without, Java's later ones with it."""
    fields = {"topic": "orders", "key": "k", "_UNIQUE_KEY_QUERY": "true", ACCESS_KEY: "alice"}
    all_fields = request(12, ext_fields={**fields, SIGNATURE: signature(fields, b"", b"aliceSecret")})
    without = {name: value for name, value in fields.items() if name != "_UNIQUE_KEY_QUERY"}
    fewer = request(12, ext_fields={**fields, SIGNATURE: signature(without, b"", b"aliceSecret")})
    ours = signed("alice", "aliceSecret", 12, {"topic": "orders", "key": "k", "_UNIQUE_KEY_QUERY": "true"}, b"")
    for command in (all_fields, fewer, ours):
        assert control().authenticate(command, HERE).name == "alice"
    assert not is_signed_with(msgspec.structs.replace(fewer, code=33), b"aliceSecret")


def test_zone_fields_that_java_adds_after_signing_do_no_harm() -> None:
    assert is_signed_with(changed(GOOD, {"__ZONE_NAME": "z", "__ZONE_MODE": "true"}), b"aliceSecret")
    assert not is_signed_with(changed(GOOD, {"__ZONE_NAME": "z", "other": "z"}), b"aliceSecret")


def authorize(
    access: UserAccessControl, name: str, *needs: Need, code: int = SEND, is_admin: bool = False, address: str = HERE
) -> str | None:
    """The remark of the refusal; None when there is none."""
    try:
        access.authorize(Account(name, is_admin=is_admin), needs, request(code), address)
    except NoPermission as error:
        return error.remark
    return None


def topic(name: str) -> Need:
    return Need(ResourceType.TOPIC, name, PUB)


CLUSTER = Need(ResourceType.CLUSTER, ANY_NAME, GET)


def test_every_needed_right_is_asked_for() -> None:
    access = control()
    assert authorize(access, "alice") is None
    assert authorize(access, "alice", topic("orders")) is None
    remark = "User:alice has no permission to access Topic:secret from 127.0.0.1, no matched policies."
    assert authorize(access, "alice", topic("orders"), topic("secret")) == remark
    remark = "User:alice has no permission to access Topic:x1 from 127.0.0.1, the decision is deny."
    assert authorize(access, "alice", topic("x1")) == remark
    remark = "User:nobody has no permission to access Topic:orders from 10.0.0.9, no matched policies."
    assert authorize(access, "nobody", topic("orders"), address="10.0.0.9") == remark
    assert authorize(access, "root", topic("secret"), is_admin=True) is None
    assert "Topic:a?b from" in str(authorize(access, "nobody", topic("a\nb")))


def test_a_right_on_a_cluster_is_one_on_the_own_cluster() -> None:
    assert authorize(control(), "alice", CLUSTER) is None
    remark = "User:alice has no permission to access Cluster:Red from 127.0.0.1, no matched policies."
    assert authorize(control(AccessSettings("Red")), "alice", CLUSTER) == remark


def test_a_right_on_some_topic_may_be_on_any() -> None:
    assert authorize(control(), "alice", topic(ANY_NAME)) is None
    assert authorize(control(), "nobody", topic(ANY_NAME)) is not None


def test_without_authorization_every_user_may_everything_but_administer_users() -> None:
    access = control(AccessSettings("Blue", is_authorizing=False))
    assert authorize(access, "nobody", topic("orders"), CLUSTER) is None
    for code in ACCOUNT_CODES:
        assert authorize(access, "nobody", CLUSTER, code=code) is not None
        assert authorize(access, "root", CLUSTER, code=code, is_admin=True) is None


def test_white_lists_free_their_codes_and_no_others() -> None:
    settings = AccessSettings("Blue", True, frozenset({SEND}), frozenset({30}))
    access = control(settings)
    assert access.authenticate(request(SEND), HERE) == Account("", is_white=True)
    assert access.authenticate(signed("alice", "aliceSecret"), HERE) == Account("alice")
    assert refusal(access, request(30)) == "username cannot be null."
    assert authorize(access, "nobody", topic("orders"), code=30) is None
    # No signature is not yet a right.
    assert authorize(access, "", topic("orders")) == "username cannot be null."
    assert authorize(access, "", code=SEND) == "username cannot be null."


def test_changes_are_seen_by_the_next_request() -> None:
    access = control()
    before = access.generation
    assert set(access.secrets) == {"root", "alice", "nobody"}
    access.accounts.put_user(User("alice", "newSecret"))
    assert access.generation > before
    assert access.secrets["alice"] == b"newSecret"
    assert refusal(access, signed("alice", "aliceSecret")) == "check signature failed."
    access.accounts.delete_user("alice")
    assert refusal(access, signed("alice", "newSecret")) == "User:alice is not found."
    assert "alice" not in access.accounts.acls


def test_what_does_not_change_anything_is_no_new_generation() -> None:
    accounts = control().accounts
    before = accounts.generation
    accounts.delete_user("nosuch")
    accounts.put_user(accounts.users["alice"])
    accounts.put_acl(accounts.acls["alice"])
    assert accounts.generation == before


def test_a_change_that_cannot_be_saved_is_none() -> None:
    accounts = control().accounts

    def fail(users: object, acls: object) -> None:
        raise OSError("disk full")

    accounts.save = fail
    before = accounts.users, accounts.acls, accounts.generation
    with pytest.raises(OSError, match="disk full"):
        accounts.delete_user("alice")
    assert (accounts.users, accounts.acls, accounts.generation) == before


def test_an_acl_needs_its_user() -> None:
    with pytest.raises(AccessRuleError, match=r"The subject of User:nosuch is not exist\."):
        control().accounts.put_acl(acl_of(rules("nosuch", rule("*", "All"))))


def test_no_text_about_an_account_has_its_password() -> None:
    access = control()
    assert "Secret" not in f"{access!r} {access.accounts!r} {access.accounts.users}"
