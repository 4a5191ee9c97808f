"""The access rules of ACL 2.0, and the decision that follows from them.

    Acl (one user) ─▶ Policy (Custom, then Default) ─▶ PolicyEntry (a resource, actions, source addresses, a decision)

Of the entries of a policy that match what is asked, the one with the most exact resource decides: a named type before
`*`, a literal name before a prefix, a longer prefix before a shorter one, a prefix before `Type:*`, and Deny before
Allow. The Default policy is asked only when no entry of the Custom policy matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

from downrange.auth.access_control import ANY_NAME, Action, Need, ResourceType
from downrange.auth.users import AccessRuleError, named, subject_of

ALL_ACTIONS: Final = tuple(Action)
_ALL: Final = "all"
# Names that no resource has stand for all those that a pattern covers and no more exact entry names.
_OTHER: Final = "\0"


class PolicyType(StrEnum):
    """The two policies of an ACL, in the order in which they are asked."""

    CUSTOM = "Custom"
    DEFAULT = "Default"


class Decision(StrEnum):
    ALLOW = "Allow"
    DENY = "Deny"


class Pattern(IntEnum):
    """How a resource covers names, the most exact way first."""

    LITERAL = 0
    PREFIXED = 1
    ANY = 2


class Resource(NamedTuple):
    """What an entry is about: `*`, `Topic:*`, `Topic:prefix*` or `Topic:name`; without a type it is everything."""

    resource_type: ResourceType | None
    pattern: Pattern
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Resource:
        if text == ANY_NAME:
            return cls(None, Pattern.ANY)
        kind, colon, name = text.partition(":")
        resource_type = named(ResourceType, kind, "resource type")
        if not colon or not name:
            raise AccessRuleError(f"The resource {text!r} has no name, expected {resource_type}:NAME")
        if name == ANY_NAME:
            return cls(resource_type, Pattern.ANY)
        stem = name.removesuffix(ANY_NAME)
        if ANY_NAME in stem or not stem.isprintable():
            raise AccessRuleError(
                f"The resource {text!r} is unknown: * may only stand at the end, control characters nowhere"
            )
        return cls(resource_type, Pattern.LITERAL if stem == name else Pattern.PREFIXED, stem)

    def __str__(self) -> str:
        if self.resource_type is None:
            return ANY_NAME
        return f"{self.resource_type}:{self.name}{'' if self.pattern is Pattern.LITERAL else ANY_NAME}"

    def covers(self, resource_type: ResourceType, name: str) -> bool:
        if self.resource_type not in (None, resource_type):
            return False
        match self.pattern:
            case Pattern.LITERAL:
                return name == self.name
            case Pattern.PREFIXED:
                return name.startswith(self.name)
            case Pattern.ANY:
                return True

    @property
    def rank(self) -> tuple[bool, Pattern, int]:
        """Smaller for a more exact resource."""
        return self.resource_type is None, self.pattern, -len(self.name)

    @property
    def sample(self) -> str:
        """A name that this resource covers, and of the more exact ones none."""
        return self.name if self.pattern is Pattern.LITERAL else self.name + _OTHER


class Sources(NamedTuple):
    """The addresses from which an entry counts: single ones, or networks as in `10.1.0.0/16`. None at all: any."""

    texts: tuple[str, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Sources:
        kept = tuple(texts)
        try:
            return cls(kept, tuple(ip_network(text, strict=False) for text in kept))
        except ValueError:
            raise AccessRuleError("Sources are addresses, or networks as in 10.1.0.0/16") from None

    def has(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address.version == network.version and address in network for network in self.networks)


class PolicyEntry(NamedTuple):
    """One rule: whether the user may do these things with this resource from these addresses."""

    resource: Resource
    actions: tuple[Action, ...]
    decision: Decision
    sources: Sources = Sources()

    def counts_for(self, actions: frozenset[Action], address: str) -> bool:
        """Whether the entry says anything about one of these actions, asked for from this address."""
        return not actions.isdisjoint(self.actions) and self._is_from(address)

    def _is_from(self, address: str) -> bool:
        if not self.sources.networks:
            return True
        peer = read_address(address)
        # Nobody can say whether an unreadable address is in a network: it must not get around a Deny.
        return self.decision is Decision.DENY if peer is None else self.sources.has(peer)

    @property
    def rank(self) -> tuple[object, ...]:
        """Smaller for the entry that decides."""
        return *self.resource.rank, self.decision is Decision.ALLOW


class Policy(NamedTuple):
    """The entries of one policy, each about another resource."""

    policy_type: PolicyType
    entries: tuple[PolicyEntry, ...]

    def decision(self, need: Need, address: str) -> Decision | None:
        """What the policy says about a right on one resource; None when no entry matches."""
        matching = [
            entry
            for entry in self.entries
            if entry.resource.covers(need.resource_type, need.name) and entry.counts_for(need.actions, address)
        ]
        return min(matching, key=lambda entry: entry.rank).decision if matching else None

    def merged(self, entries: Iterable[PolicyEntry]) -> Policy:
        """The policy with these entries in the place of those about the same resources, new ones behind."""
        table = {entry.resource: entry for entry in self.entries}
        table |= {entry.resource: entry for entry in entries}
        return self._replace(entries=tuple(table.values()))


@dataclass(frozen=True, slots=True)
class Acl:
    """All access rules of one user. Holds always: each policy type occurs once, and no policy is empty."""

    username: str
    policies: tuple[Policy, ...]

    @property
    def subject(self) -> str:
        return subject_of(self.username)

    def policy(self, policy_type: PolicyType) -> Policy:
        """The policy of a type; an empty one when the ACL has none."""
        found = (policy for policy in self.policies if policy.policy_type is policy_type)
        return next(found, Policy(policy_type, ()))

    def decision(self, need: Need, address: str) -> Decision | None:
        """What the rules say about a right; None when none matches. Of all resources one with the right is enough."""
        if need.name == ANY_NAME:
            return self._decision_on_some(need, address)
        for policy_type in PolicyType:
            found = self.policy(policy_type).decision(need, address)
            if found is not None:
                return found
        return None

    def _decision_on_some(self, need: Need, address: str) -> Decision | None:
        decisions = {
            self.decision(need._replace(name=entry.resource.sample), address)
            for policy in self.policies
            for entry in policy.entries
            if entry.resource.resource_type in (None, need.resource_type)
        }
        return next((one for one in (Decision.ALLOW, Decision.DENY) if one in decisions), None)

    def merged(self, policies: Iterable[Policy]) -> Acl:
        """The ACL with these entries in the place of those about the same resources."""
        acl = self
        for policy in policies:
            acl = acl._with(acl.policy(policy.policy_type).merged(policy.entries))
        return acl

    def without(self, policy_type: PolicyType, resource: Resource) -> Acl:
        """The ACL without the entry about a resource."""
        policy = self.policy(policy_type)
        kept = tuple(entry for entry in policy.entries if entry.resource != resource)
        return self._with(policy._replace(entries=kept))

    def _with(self, policy: Policy) -> Acl:
        table = {one.policy_type: one for one in self.policies} | {policy.policy_type: policy}
        return replace(self, policies=tuple(one for one in table.values() if one.entries))


def parse_actions(texts: Iterable[str]) -> tuple[Action, ...]:
    """Actions by their names; `All` stands for each of them."""
    found = [ALL_ACTIONS if name.casefold() == _ALL else (named(Action, name, "action"),) for name in texts]
    return tuple(dict.fromkeys(action for actions in found for action in actions))


def action_names(actions: tuple[Action, ...]) -> tuple[str, ...]:
    return ("All",) if len(actions) == len(ALL_ACTIONS) else tuple(action.value for action in actions)


def read_address(text: str) -> IPv4Address | IPv6Address | None:
    """The address of a peer; None when the text is none. An IPv4 address mapped into IPv6 is the IPv4 address."""
    try:
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped
