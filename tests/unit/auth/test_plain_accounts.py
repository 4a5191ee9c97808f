"""The content of plain_acl.yml: what it says, what is refused, how it is changed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from downrange.auth.access_control import ANY_NAME
from downrange.auth.acl_yaml import Yaml, YamlError, read_yaml, write_yaml
from downrange.auth.plain_accounts import (
    DENY,
    PERMISSIONS,
    AccountChange,
    PlainAclError,
    read_acl,
    to_write,
    with_account,
    with_white_list,
    without_account,
)
from downrange.protocol.bodies.data_version import DataVersion

NONE, PUB, SUB, BOTH = DENY, PERMISSIONS["PUB"], PERMISSIONS["SUB"], PERMISSIONS["PUB|SUB"]

SHOP = b"""
globalWhiteRemoteAddresses: [10.0.0.*, 192.168.7.1]
accounts:
- accessKey: shop-key
  secretKey: 12345678
  whiteRemoteAddress: 10.1.2.3
  admin: false
  defaultTopicPerm: SUB
  topicPerms: [orders=PUB|SUB, audit=DENY, "%RETRY%billing=SUB", ' spaced = SUB|PUB ']
  groupPerms: [shop=SUB]
- {accessKey: root-key, secretKey: root-secret, admin: true}
dataVersion: [{counter: 7, timestamp: 99}]
"""


def test_a_file_is_read() -> None:
    acl = read_acl(read_yaml(SHOP))
    shop, root = acl.accounts
    assert (shop.access_key, shop.secret_key, shop.is_admin) == ("shop-key", "12345678", False)
    assert shop.topics.of("orders") == shop.topics.of("spaced") == BOTH
    assert (shop.topics.of("audit"), shop.topics.of("other")) == (NONE, SUB)
    assert (shop.groups.of("shop"), shop.groups.of("billing"), shop.groups.of("other")) == (SUB, SUB, NONE)
    assert (shop.topics.of(ANY_NAME), shop.groups.of(ANY_NAME)) == (BOTH, SUB)
    assert (root.is_admin, root.is_unlimited, shop.is_unlimited) == (True, True, False)
    assert (len(acl.white_addresses), acl.version, acl.warnings) == (2, DataVersion(counter=7, timestamp=99), ())


def test_secrets_are_in_no_repr() -> None:
    acl = read_acl(read_yaml(SHOP))
    change = AccountChange("shop-key", "12345678", admin=True)
    assert "12345678" not in repr(acl) + repr(acl.accounts[0]) + repr(change) + str(change)


def test_an_empty_file_has_no_accounts() -> None:
    for text in (b"", b"{}", b"accounts:\n", b"accounts: []\nglobalWhiteRemoteAddresses:\n"):
        acl = read_acl(read_yaml(text))
        assert (acl.accounts, acl.white_addresses) == ((), ())


ONE = "accounts: [{accessKey: shop-key, secretKey: its-secret, %s}]"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "accounts: [{accessKey: short1, secretKey: long-enough}]",
            "The accessKey=short1 and secretKey=.* longer than 6",
        ),
        (
            "accounts: [{accessKey: long-enough, secretKey: short1}]",
            "The accessKey=long-enough and secretKey=.* longer",
        ),
        ("accounts: [{secretKey: long-enough}]", "The accessKey= and secretKey=.* cannot be null"),
        ("accounts: [{accessKey: [a, b], secretKey: long-enough}]", "accessKey of account 1: expected a text"),
        ('accounts: [{accessKey: "long\\nenough", secretKey: long-enough}]', "characters that cannot be printed"),
        ('accounts: [{accessKey: "long\\0enough", secretKey: long-enough}]', "characters that cannot be printed"),
        (ONE % "topicPerms: [x=y=z]", "account shop-key: Parse resource permission failed for topic:x=y=z"),
        (ONE % "groupPerms: [nonsense]", "account shop-key: Parse resource permission failed for group:nonsense"),
        (ONE % "topicPerms: [=SUB]", "Parse resource permission failed for topic:=SUB"),
        (ONE % "topicPerms: orders=PUB", "account shop-key: topicPerms: expected a list"),
        (ONE % "topicPerms: [{a: b}]", "account shop-key: an entry of topicPerms: expected a text"),
        (ONE % "admin: perhaps", "account shop-key: admin: expected true or false"),
        (ONE % "admin: [true]", "account shop-key: admin: expected a text"),
        (ONE % "whiteRemoteAddress: 999.1.1.1", "account shop-key: '999.1.1.1' is no address pattern"),
        (ONE % "defaultTopicPerm: [PUB]", "account shop-key: defaultTopicPerm: expected a text"),
        ("globalWhiteRemoteAddresses: [nonsense]", "globalWhiteRemoteAddresses: 'nonsense' is no address pattern"),
        ("globalWhiteRemoteAddresses: 10.0.0.1", "globalWhiteRemoteAddresses: expected a list"),
        ("accounts: {accessKey: a}", "accounts: expected a list"),
        ("accounts: [a]", "account 1: expected members"),
        ("[a]", "the file: expected members"),
        ("text", "the file: expected members"),
    ],
)
def test_a_wrong_account_makes_the_file_wrong(text: str, complaint: str) -> None:
    with pytest.raises(PlainAclError, match=complaint) as refused:
        read_acl(read_yaml(text.encode()))
    assert "its-secret" not in str(refused.value)
    assert "long-enough" not in str(refused.value).replace("accessKey=long-enough", "")


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (ONE % "topicPerms: ['orders=PUB,SUB']", "account shop-key: topic orders: 'PUB,SUB' means DENY"),
        (ONE % "defaultTopicPerm: ANY", "account shop-key: defaultTopicPerm: 'ANY' means DENY"),
        (ONE % "topicPerm: [a=PUB]", "account shop-key: topicPerm has no meaning"),
        ("account: []", "account has no meaning"),
        (
            ONE.replace("]", ", {accessKey: shop-key, secretKey: another1}]") % "admin: false",
            "shop-key stands there twice",
        ),
    ],
)
def test_what_its_writer_hardly_meant_is_a_warning(text: str, warning: str) -> None:
    acl = read_acl(read_yaml(text.encode()))
    assert len(acl.warnings) == 1
    assert warning in acl.warnings[0]
    assert all(not one.topics.by_name.get("orders") for one in acl.accounts)
    assert all(one.secret_key == "its-secret" for one in acl.accounts)  # noqa: S105


def test_a_change_keeps_what_it_does_not_name() -> None:
    content = with_account(read_yaml(SHOP), AccountChange("shop-key", "new-secret", admin=True, group_perms=["a=SUB"]))
    acl = read_acl(content)
    shop = acl.accounts[0]
    assert (shop.secret_key, shop.is_admin, shop.groups.of("a"), shop.groups.of("shop")) == (
        "new-secret", True, SUB, NONE,
    )  # fmt: skip
    assert shop.topics.of("orders") == BOTH
    content = with_account(content, AccountChange("third-key", "third-secret", admin=False, default_topic_perm="PUB"))
    assert [one.access_key for one in read_acl(content).accounts] == ["shop-key", "root-key", "third-key"]
    content = with_white_list(without_account(content, "shop-key"), ["10.1.2.{3,4}"])
    assert [one.access_key for one in read_acl(content).accounts] == ["root-key", "third-key"]
    assert len(read_acl(content).white_addresses) == 2


def test_a_change_of_an_empty_file() -> None:
    for content in (None, {}, {"accounts": None}):
        changed = with_account(content, AccountChange("third-key", "third-secret", admin=False))
        assert [one.access_key for one in read_acl(changed).accounts] == ["third-key"]
        assert read_acl(with_white_list(content, ["*"])).white_addresses
        assert read_acl(without_account(content, "third-key")).accounts == ()


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("nonsense", "Parse Resource format error for nonsense."),
        ("x=y=z", "Parse Resource format error"),
        ("orders=ANY", "Parse resource permission error for orders=ANY"),
        ("=PUB", "Parse Resource format error"),
    ],
)
def test_a_change_with_a_wrong_permission_is_refused(entry: str, complaint: str) -> None:
    for change in (
        AccountChange("shop-key", "its-secret", admin=False, topic_perms=[entry]),
        AccountChange("shop-key", "its-secret", admin=False, group_perms=["a=SUB", entry]),
    ):
        with pytest.raises(PlainAclError, match=complaint):
            change.check()


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
perms = st.sampled_from(["DENY", "PUB", "SUB", "PUB|SUB", "SUB|PUB", "ANY", ""])
entries = st.builds("{}={}".format, texts, perms) | texts
members = st.fixed_dictionaries(
    {},
    optional={
        "accessKey": texts | st.none() | st.just("long-enough"),
        "secretKey": texts | st.none() | st.just("12345678"),
        "whiteRemoteAddress": texts | st.none() | st.sampled_from(["10.1.2.*", "*", "::1"]),
        "admin": st.sampled_from(["true", "false", None, "yes", "maybe"]),
        "defaultTopicPerm": perms | st.none(),
        "topicPerms": st.lists(entries, max_size=3) | st.none() | texts,
        "groupPerms": st.lists(entries, max_size=3) | st.none(),
    },
)
contents = st.fixed_dictionaries(
    {},
    optional={
        "globalWhiteRemoteAddresses": st.lists(st.sampled_from(["*", "1.2.3.4", "x"]), max_size=2) | st.none() | texts,
        "accounts": st.lists(members | texts | st.none(), max_size=3) | st.none() | members,
        "dataVersion": st.lists(st.dictionaries(st.sampled_from(["counter", "timestamp"]), texts), max_size=2) | texts,
    },
)


@given(contents | texts | st.none())
@settings(max_examples=400)
def test_any_content_is_read_or_refused(content: Yaml) -> None:
    try:
        acl = read_acl(content)
    except PlainAclError as error:
        assert str(error)  # noqa: PT017
        return
    for account in acl.accounts:
        assert len(account.access_key) > 6
        assert len(account.secret_key) > 6


@given(
    contents, st.builds(AccountChange, texts.map("key-{}-long".format), texts.map("secret-{}".format), st.booleans())
)
@settings(max_examples=300)
def test_what_is_changed_and_written_means_the_same_when_it_is_read(content: Yaml, change: AccountChange) -> None:
    try:
        before = read_acl(content)
        changed = to_write(with_account(content, change), DataVersion(counter=1, timestamp=2))
        after = read_acl(changed)
    except PlainAclError:
        return
    try:
        again = read_acl(read_yaml(write_yaml(changed)))
    except YamlError as error:
        raise AssertionError(changed) from error
    assert again == after
    assert {one.access_key for one in after.accounts} == {one.access_key for one in before.accounts} | {
        change.access_key
    }
