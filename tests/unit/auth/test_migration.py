"""Accounts of 1.0 become users that may do what the accounts could, and nothing more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.access_control import Account, Action, Need, ResourceType
from downrange.auth.accounts import Accounts
from downrange.auth.migration import migrate, migrated
from downrange.auth.plain_accounts import Permissions, PlainAccount
from downrange.auth.plain_acl import PlainAccessControl
from downrange.auth.policies import Decision, PolicyType
from downrange.auth.users import AccessRuleError, User
from downrange.protocol.command import request
from downrange.protocol.errors import BrokerError

PUB, SUB = frozenset({Action.PUB}), frozenset({Action.SUB})
DENY: frozenset[Action] = frozenset()
SECRET = "of-this-account"  # noqa: S105  of nobody


NONE = Permissions(DENY, {})


def plain(key: str, *, is_admin: bool = False, topics: Permissions = NONE, groups: Permissions = NONE) -> PlainAccount:
    return PlainAccount(key, SECRET, (), is_admin, topics, groups)


SHOP = plain(
    "shop-account",
    topics=Permissions(SUB, {"orders": PUB, "bills": PUB | SUB, "salaries": DENY}),
    groups=Permissions(DENY, {"billing": SUB}),
)


@pytest.mark.parametrize(
    ("kind", "name", "actions", "allowed"),
    [
        ("Topic", "orders", PUB, True),
        ("Topic", "orders", SUB, False),  # the default permission is for other topics only
        ("Topic", "bills", SUB, True),
        ("Topic", "salaries", SUB, False),
        ("Topic", "salaries", PUB, False),
        ("Topic", "others", SUB, True),
        ("Topic", "others", PUB, False),
        ("Group", "billing", SUB, True),
        ("Group", "others", SUB, False),
        ("Topic", "orders", frozenset({Action.CREATE}), False),
        ("Cluster", "c", frozenset({Action.GET}), False),
    ],
)
def test_permissions_become_rules(kind: str, name: str, actions: frozenset[Action], allowed: bool) -> None:
    user, acl = migrated(SHOP)
    assert not user.is_super
    assert user.password == SECRET
    decision = acl.decision(Need(ResourceType(kind), name, actions), "127.0.0.1")
    assert (decision is Decision.ALLOW) == allowed


def test_names_become_custom_rules_and_defaults_rules_of_the_default_policy() -> None:
    _, acl = migrated(SHOP)
    entries = {kind: [str(one.resource) for one in acl.policy(kind).entries] for kind in PolicyType}
    assert entries[PolicyType.CUSTOM] == ["Topic:orders", "Topic:bills", "Topic:salaries", "Group:billing"]
    assert entries[PolicyType.DEFAULT] == ["Topic:orders", "Topic:*"]


def test_an_admin_becomes_a_super_user() -> None:
    user, acl = migrated(plain("admin-account", is_admin=True))
    assert user.is_super
    assert acl.policies == ()


def test_users_that_exist_stay_as_they_are() -> None:
    accounts = Accounts()
    known = User("shop-account", "another")
    accounts.put_user(known)
    assert migrate([SHOP, plain("new-account")], accounts) == ["new-account"]
    assert accounts.users["shop-account"] == known
    assert accounts.acls == {}
    assert migrate([SHOP, plain("new-account")], accounts) == []


def test_a_star_in_the_name_of_1_0_does_not_become_a_pattern() -> None:
    with pytest.raises(AccessRuleError, match=r"a name with \* cannot be migrated"):
        migrated(plain("shop-account", topics=Permissions(DENY, {"or*": PUB})))


PERMISSION = st.sampled_from([DENY, PUB, SUB, PUB | SUB])
PERMISSIONS = st.builds(Permissions, PERMISSION, st.dictionaries(st.sampled_from("abc"), PERMISSION))


@given(
    topics=PERMISSIONS,
    groups=PERMISSIONS,
    kind=st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
    name=st.sampled_from("abcd"),
    actions=st.sampled_from([PUB, SUB, PUB | SUB]),
)
def test_a_migrated_user_may_do_what_the_account_could_and_no_more(
    topics: Permissions, groups: Permissions, kind: ResourceType, name: str, actions: frozenset[Action]
) -> None:
    account = plain("some-account", topics=topics, groups=groups)
    before = PlainAccessControl()
    before.put({account.access_key: account}, ())
    need = Need(kind, name, actions)
    try:
        before.authorize(Account(account.access_key), [need], request(310), "127.0.0.1")
        could = True
    except BrokerError:
        could = False
    _, acl = migrated(account)
    assert (acl.decision(need, "127.0.0.1") is Decision.ALLOW) == could
