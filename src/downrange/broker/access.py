"""The access control of one broker: which of the two generations it uses, and the parts that belong to it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from downrange.auth.access_control import AccessControl
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.broker.config import BrokerConfig
from downrange.clock import Clock
from downrange.settings import ConfigError


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Decides about requests (`control`; None lets everybody in), with the files that its accounts come from."""

    control: AccessControl | None = None
    plain_acl: PlainAclFiles | None = None

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What has to run for as long as the broker does."""
        return {} if self.plain_acl is None else {"plain_acl": self.plain_acl.watch()}


def broker_access(config: BrokerConfig, clock: Clock) -> BrokerAccess:
    """The access control that a configuration asks for. Raises ConfigError when it cannot be had."""
    if not config.acl_enable:
        return BrokerAccess()
    if config.acl_file is None:
        raise ConfigError("aclEnable=true needs aclFile, the file with the accounts, or a broker.conf to look beside")
    files = PlainAclFiles(config.acl_file, clock)
    return BrokerAccess(files.access_control, files)
