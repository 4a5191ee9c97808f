"""The access control of one broker: which of the two generations it uses, and the parts that belong to it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from downrange.auth.access_control import AccessControl
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.auth.user_access_control import UserAccessControl
from downrange.broker.config import BrokerConfig
from downrange.broker.services.housekeeping import answer_waiting_pulls
from downrange.broker.user_access import user_access_control
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import Clock
from downrange.settings import ConfigError
from downrange.store.config import StoreConfig


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Decides about requests (`control`; None lets everybody in), with the parts of the generation that is used."""

    control: AccessControl | None = None
    plain_acl: PlainAclFiles | None = None
    """The files of 4.x."""
    users: UserAccessControl | None = None
    """The users and policies of ACL 2.0."""

    def services(self, waiting: WaitingPulls, clock: Clock) -> dict[str, Coroutine[Any, Any, None]]:
        """What has to run for as long as the broker does."""
        found: dict[str, Coroutine[Any, Any, None]] = {}
        if self.control is not None:
            found["changed_rights"] = answer_waiting_pulls(self.control, waiting, clock)
        if self.plain_acl is not None:
            found["plain_acl"] = self.plain_acl.watch()
        return found


def plain_access(config: BrokerConfig, clock: Clock) -> BrokerAccess:
    """Access control 4.x, if a configuration asks for it. Raises ConfigError when it cannot be had."""
    if not config.acl_enable:
        return BrokerAccess()
    if config.acl_file is None:
        raise ConfigError("aclEnable=true needs aclFile, the file with the accounts, or a broker.conf to look beside")
    files = PlainAclFiles(config.acl_file, clock)
    return BrokerAccess(files.access_control, files)


def user_access(config: BrokerConfig, store: StoreConfig) -> BrokerAccess:
    """ACL 2.0. Its file is in the store, which must be open, so that no other broker writes there."""
    users = user_access_control(config, store)
    return BrokerAccess(users, users=users)
