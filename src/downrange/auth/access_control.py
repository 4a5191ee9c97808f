"""The words of access control, and the interface that both generations of it offer.

    Guard ─▶ AccessControl.authenticate ─▶ needs.py: the rights a request needs ─▶ AccessControl.authorize

`PlainAccessControl` (4.x, plain_acl.yml) and `UserAccessControl` (5.x, ACL 2.0) implement the interface.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from downrange.protocol.command import Command


class ResourceType(StrEnum):
    """The kinds of things that an account may have rights on."""

    CLUSTER = "Cluster"
    NAMESPACE = "Namespace"
    TOPIC = "Topic"
    GROUP = "Group"


class Action(StrEnum):
    """The rights that an account may have on a resource."""

    PUB = "Pub"
    SUB = "Sub"
    CREATE = "Create"
    UPDATE = "Update"
    DELETE = "Delete"
    GET = "Get"
    LIST = "List"


ANY_NAME: Final = "*"
"""The name in a `Need` that any resource of its type satisfies: one resource with the right is enough."""


class Need(NamedTuple):
    """A right that a request needs: one of `actions` on one resource."""

    resource_type: ResourceType
    name: str
    actions: frozenset[Action]


class Account(NamedTuple):
    """The account that a request came from, after its signature or its address was checked."""

    name: str
    """The access key; empty for a peer that a global white list let in."""
    is_admin: bool = False
    """Whether the account may do everything: `admin` of 4.x, a Super user of 5.x."""
    is_white: bool = False
    """Whether a white list let the peer in by its address. No right to administer follows from that."""


class AccessControl(Protocol):
    """Accounts and their rights. The methods raise a `BrokerError` whose code and remark are those of RocketMQ."""

    @property
    def generation(self) -> int:
        """Grows with every change of accounts or rights: decisions that were made before it are made again."""

    @property
    def secrets(self) -> Mapping[str, bytes]:
        """The secret key of every account that may sign requests, by access key."""

    def authenticate(self, command: Command, address: str) -> Account:
        """The account that signed a request, or that the peer's address (without port) stands for."""

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        """Raise unless the account has every one of these rights."""
