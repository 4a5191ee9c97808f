"""The decision of ACL 2.0 against a model that knows nothing of ranks: it asks one kind of entry after the other.

The model works on plain dicts: {"policy", "type", "name", "actions", "networks", "allow"}; a name ends with `*` or not.
"""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from downrange.auth.access_control import Action, Need, ResourceType
from downrange.auth.account_table import acl_info, acl_of
from downrange.auth.policies import Acl, Decision
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.users import AclInfo, PolicyEntryInfo, PolicyInfo

Rule = dict[str, Any]

NAMES = st.text(alphabet="ab", min_size=0, max_size=4)
ADDRESSES = ("10.0.0.1", "10.0.1.1", "10.1.0.1", "192.168.0.1")
NETWORKS = ("10.0.0.1", "10.0.0.0/24", "10.0.0.0/16", "0.0.0.0/0", "192.168.0.0/16")
TYPES = ("Topic", "Group", "*")


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    kind = draw(st.sampled_from(TYPES))
    name = draw(NAMES)
    if kind == "*" or draw(st.booleans()) or not name:
        name = "*" if kind == "*" else name + "*"
    return {
        "policy": draw(st.sampled_from(["Custom", "Default"])),
        "type": kind,
        "name": name,
        "actions": draw(st.sets(st.sampled_from(["Pub", "Sub", "Get", "All"]), min_size=1)),
        "networks": draw(st.lists(st.sampled_from(NETWORKS), max_size=2)),
        "allow": draw(st.booleans()),
    }


def as_acl(entries: list[Rule]) -> Acl:
    """The rules as a request would bring them."""
    return acl_of(
        AclInfo(
            subject="User:u",
            policies=tuple(
                PolicyInfo(
                    policy_type=rule["policy"],
                    entries=(
                        PolicyEntryInfo(
                            resource="*" if rule["type"] == "*" else f"{rule['type']}:{rule['name']}",
                            actions=tuple(sorted(rule["actions"])),
                            source_ips=tuple(rule["networks"]),
                            decision="Allow" if rule["allow"] else "Deny",
                        ),
                    ),
                )
                for rule in entries
            ),
        )
    )


def model(entries: list[Rule], kind: str, name: str, actions: set[str], address: str) -> bool | None:
    """True allow, False deny, None when no rule matches."""
    last = {(rule["policy"], rule["type"], rule["name"]): rule for rule in entries}  # a later rule replaces
    for policy in ("Custom", "Default"):
        live = [
            rule
            for rule in last.values()
            if rule["policy"] == policy
            and (rule["actions"] & actions or "All" in rule["actions"])
            and (
                not rule["networks"] or any(ip_address(address) in ip_network(network) for network in rule["networks"])
            )
        ]
        steps: list[tuple[str, str]] = [(kind, name)]
        steps += [(kind, name[:length] + "*") for length in range(len(name), -1, -1)]
        steps.append(("*", "*"))
        for wanted in steps:
            found = [rule["allow"] for rule in live if (rule["type"], rule["name"]) == wanted]
            if found:
                return all(found)
    return None


@given(
    entries=st.lists(rules(), max_size=8),
    kind=st.sampled_from(["Topic", "Group"]),
    name=NAMES,
    actions=st.sets(st.sampled_from(["Pub", "Sub", "Get"]), min_size=1),
    address=st.sampled_from(ADDRESSES),
)
def test_the_decision_is_that_of_the_model(
    entries: list[Rule], kind: str, name: str, actions: set[str], address: str
) -> None:
    need = Need(ResourceType(kind), name, frozenset(map(Action, actions)))
    expected = {True: Decision.ALLOW, False: Decision.DENY, None: None}[model(entries, kind, name, actions, address)]
    assert as_acl(entries).decision(need, address) is expected


@given(
    entries=st.lists(rules(), max_size=6),
    actions=st.sets(st.sampled_from(["Pub", "Sub"]), min_size=1),
    address=st.sampled_from(ADDRESSES),
)
def test_a_right_on_some_topic_is_one_on_a_topic_that_can_be_named(
    entries: list[Rule], actions: set[str], address: str
) -> None:
    """`c` stands for all names that no rule spells out."""
    stems = {rule["name"].removesuffix("*") for rule in entries}
    names = {*stems, *(stem + "c" for stem in stems), "c"}
    is_allowed = any(model(entries, "Topic", name, actions, address) for name in names)
    need = Need(ResourceType.TOPIC, "*", frozenset(map(Action, actions)))
    assert (as_acl(entries).decision(need, address) is Decision.ALLOW) == is_allowed


@given(entries=st.lists(rules(), max_size=8))
def test_an_acl_survives_its_way_over_the_wire(entries: list[Rule]) -> None:
    acl = as_acl(entries)
    assert acl_of(decode_body(AclInfo, encode_body(acl_info(acl)))) == acl
