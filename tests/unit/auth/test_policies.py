"""The decision of ACL 2.0: the table of the right order, patterns, source addresses, and names that are errors."""

from __future__ import annotations

import pytest

from downrange.auth.access_control import ANY_NAME, Action, Need, ResourceType
from downrange.auth.policies import (
    ALL_ACTIONS,
    Acl,
    Decision,
    Policy,
    PolicyEntry,
    PolicyType,
    Resource,
    Sources,
    action_names,
    parse_actions,
    read_address,
)
from downrange.auth.users import AccessRuleError, UserType, check_username, named, username_of

PUB, SUB, GET = (frozenset({action}) for action in (Action.PUB, Action.SUB, Action.GET))
HERE = "127.0.0.1"


def entry(text: str, actions: str = "All", sources: str = "") -> PolicyEntry:
    """`Topic:T Deny` as an entry."""
    resource, decision = text.split()
    return PolicyEntry(
        Resource.parse(resource),
        parse_actions(actions.split(",")),
        named(Decision, decision, "decision"),
        Sources.parse(sources.split(",")) if sources else Sources(),
    )


def acl(*custom: PolicyEntry, default: tuple[PolicyEntry, ...] = ()) -> Acl:
    policies = Policy(PolicyType.CUSTOM, custom), Policy(PolicyType.DEFAULT, default)
    return Acl("alice", tuple(policy for policy in policies if policy.entries))


def topic(name: str, actions: frozenset[Action] = PUB) -> Need:
    return Need(ResourceType.TOPIC, name, actions)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (("Topic:orders Deny", "Topic:ord* Allow"), "Deny"),
        (("Topic:ord* Allow", "Topic:orders Deny"), "Deny"),
        (("Topic:orders Allow", "Topic:ord* Deny"), "Allow"),
        (("Topic:ord* Deny", "Topic:orders Allow"), "Allow"),
        (("Topic:o* Allow", "Topic:ord* Deny"), "Deny"),
        (("Topic:ord* Deny", "Topic:o* Allow"), "Deny"),
        (("Topic:ord* Allow", "Topic:o* Deny"), "Allow"),
        (("Topic:o* Deny", "Topic:ord* Allow"), "Allow"),
        (("Topic:orders Deny", "Topic:* Allow"), "Deny"),
        (("Topic:* Allow", "Topic:orders Deny"), "Deny"),
        (("Topic:* Deny", "Topic:orders Allow"), "Allow"),
        (("Topic:orders Allow", "Topic:* Deny"), "Allow"),
        (("Topic:* Deny", "Topic:ord* Allow"), "Allow"),
        (("* Deny", "Topic:orders Allow"), "Allow"),
        (("* Allow", "Topic:* Deny"), "Deny"),
        (("* Deny", "Topic:* Allow"), "Allow"),
    ],
)
def test_the_most_exact_resource_decides_in_whatever_order_entries_stand(
    entries: tuple[str, ...], expected: str
) -> None:
    rules = acl(*map(entry, entries))
    assert rules.decision(topic("orders"), HERE) is Decision(expected)
    assert acl(*map(entry, reversed(entries))).decision(topic("orders"), HERE) is Decision(expected)


def test_the_default_policy_is_asked_when_no_custom_entry_matches() -> None:
    both = acl(entry("Topic:T Deny"), default=(entry("Topic:T Allow"),))
    assert both.decision(topic("T"), HERE) is Decision.DENY
    assert both.decision(topic("other"), HERE) is None
    # The custom entry says nothing about Pub, so the default one is asked.
    other_action = acl(entry("Topic:T Allow", "Sub"), default=(entry("Topic:* Allow", "Pub"),))
    assert other_action.decision(topic("T"), HERE) is Decision.ALLOW
    assert acl(entry("* Deny"), default=(entry("Topic:T Allow"),)).decision(topic("T"), HERE) is Decision.DENY


def test_deny_beats_allow_for_one_resource() -> None:
    twice = Acl("alice", (Policy(PolicyType.CUSTOM, (entry("Topic:T Allow"), entry("Topic:T Deny"))),))
    assert twice.decision(topic("T"), HERE) is Decision.DENY


def test_one_of_the_needed_actions_is_enough() -> None:
    rules = acl(entry("Topic:T Allow", "Sub"))
    assert rules.decision(topic("T", SUB | GET), HERE) is Decision.ALLOW
    assert rules.decision(topic("T", GET), HERE) is None
    assert acl(entry("Topic:T Allow", "all")).decision(topic("T", GET), HERE) is Decision.ALLOW


def test_types_are_apart() -> None:
    rules = acl(entry("Group:T Allow"), entry("Topic:pre* Allow"))
    assert rules.decision(topic("T"), HERE) is None
    assert rules.decision(Need(ResourceType.GROUP, "prefix", SUB), HERE) is None
    assert acl(entry("* Allow")).decision(Need(ResourceType.CLUSTER, "c", GET), HERE) is Decision.ALLOW


def test_resource_names_are_compared_letter_by_letter() -> None:
    rules = acl(entry("Topic:T1 Allow"))
    for name in ("t1", "T1 ", " T1", "ns%T1", "T11", "T", "", "%RETRY%T1"):
        assert rules.decision(topic(name), HERE) is None, name


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((), None),
        (("Topic:T Allow",), "Allow"),
        (("Topic:pre* Allow",), "Allow"),
        (("* Allow",), "Allow"),
        (("Group:g Allow",), None),
        (("Topic:T Deny",), "Deny"),
        (("Topic:* Deny", "Topic:T Allow"), "Allow"),
        (("Topic:* Allow", "Topic:T Deny"), "Allow"),
        (("Topic:p* Allow", "Topic:pre* Deny", "Topic:p Deny"), "Allow"),
        (("* Allow", "Topic:* Deny"), "Deny"),
    ],
)
def test_a_right_on_some_resource_needs_one_on_which_it_is_allowed(
    entries: tuple[str, ...], expected: str | None
) -> None:
    found = acl(*map(entry, entries)).decision(topic(ANY_NAME), HERE)
    assert found == (None if expected is None else Decision(expected))


def test_a_custom_deny_takes_the_right_on_some_resource_of_the_default_policy() -> None:
    assert acl(entry("Topic:* Deny"), default=(entry("Topic:T Allow"),)).decision(topic("*"), HERE) is Decision.DENY
    assert acl(entry("Topic:T Deny"), default=(entry("Topic:* Allow"),)).decision(topic("*"), HERE) is Decision.ALLOW


@pytest.mark.parametrize(
    ("source", "address", "matches"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("127.0.0.0/8", "127.9.9.9", True),
        ("192.168.1.77/24", "192.168.1.3", True),
        ("192.168.1.0/24", "192.168.2.3", False),
        ("0.0.0.0/0", "8.8.8.8", True),
        ("0.0.0.0/0", "::1", False),
        ("::1", "[::1]", True),
        ("fe80::/10", "fe80::1%eth0", True),
        ("127.0.0.0/8", "::ffff:127.0.0.1", True),
        ("10.0.0.1,127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0/0", "nonsense", False),
    ],
)
def test_source_addresses_are_single_ones_or_networks(source: str, address: str, matches: bool) -> None:
    allowed = acl(entry("Topic:T Allow", sources=source)).decision(topic("T"), address)
    assert (allowed is Decision.ALLOW) == matches


def test_an_address_that_cannot_be_read_does_not_get_around_a_deny() -> None:
    assert acl(entry("Topic:T Deny", sources="10.0.0.0/8")).decision(topic("T"), "nonsense") is Decision.DENY
    assert read_address("nonsense") is None


def test_entries_about_one_resource_replace_each_other_in_place() -> None:
    before = acl(entry("Topic:A Allow", "Pub"), entry("Topic:B Allow", "Pub"))
    after = before.merged([Policy(PolicyType.CUSTOM, (entry("Topic:A Deny", "Sub"), entry("Topic:C Allow")))])
    assert [str(one.resource) for one in after.policy(PolicyType.CUSTOM).entries] == ["Topic:A", "Topic:B", "Topic:C"]
    assert after.policy(PolicyType.CUSTOM).entries[0] == entry("Topic:A Deny", "Sub")
    assert after.policy(PolicyType.DEFAULT).entries == ()


def test_an_acl_without_its_last_entry_has_no_policy() -> None:
    one = acl(entry("Topic:A Allow"))
    assert one.without(PolicyType.CUSTOM, Resource.parse("Topic:A")).policies == ()
    assert one.without(PolicyType.DEFAULT, Resource.parse("Topic:A")) == one
    assert one.without(PolicyType.CUSTOM, Resource.parse("Topic:A*")) == one


@pytest.mark.parametrize("text", ["*", "Topic:*", "Topic:pre*", "Topic:name", "Group:g", "Cluster:c", "Namespace:n"])
def test_the_text_of_a_resource_is_read_back(text: str) -> None:
    assert str(Resource.parse(text)) == text


def test_names_of_types_actions_and_decisions_may_be_in_any_case() -> None:
    assert Resource.parse("tOpIc:T") == Resource.parse("Topic:T")
    assert parse_actions(["pub", "SUB"]) == (Action.PUB, Action.SUB)
    assert named(Decision, "dENY", "decision") is Decision.DENY
    assert named(UserType, "super", "userType") is UserType.SUPER
    assert username_of("user:alice") == "alice"


@pytest.mark.parametrize(
    "text",
    ["", "Topic", "Topic:", "Any:x", "Nonsense:x", ":x", "Topic:a*b", "Topic:a**", "**", "Topic:\n", "Topic:a\0"],
)
def test_a_resource_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(AccessRuleError):
        Resource.parse(text)


def test_an_unknown_action_is_an_error_even_beside_a_known_one() -> None:
    with pytest.raises(AccessRuleError, match="'Nonsense' is unknown, expected Pub or Sub or"):
        parse_actions(["Pub", "Nonsense"])


def test_all_actions_are_shown_as_one_word_and_others_in_the_order_given() -> None:
    assert action_names(parse_actions(["All"])) == ("All",)
    assert action_names(parse_actions(["Get", "all"])) == ("All",)
    assert action_names(parse_actions(["Get", "Pub", "get"])) == ("Get", "Pub")
    assert parse_actions(["All"]) == ALL_ACTIONS


@pytest.mark.parametrize("source", ["nonsense", "", "1.2.3", "10.0.0.0/33", "10.0.0.*", "a.example"])
def test_a_source_that_is_no_address_is_an_error(source: str) -> None:
    with pytest.raises(AccessRuleError):
        Sources.parse([source])


@pytest.mark.parametrize("name", ["a\nb", "\0", " a", "a ", "x" * 256])
def test_names_that_would_confuse_a_log_are_refused(name: str) -> None:
    with pytest.raises(AccessRuleError):
        check_username(name)


@pytest.mark.parametrize("subject", ["alice", "", "User:", "Group:alice", ":alice"])
def test_a_subject_is_a_user(subject: str) -> None:
    with pytest.raises(AccessRuleError, match="expected User:NAME"):
        username_of(subject)
