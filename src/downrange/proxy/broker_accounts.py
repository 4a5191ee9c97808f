"""The accounts of clients of a gRPC server that stands alone: the users and ACLs (2.0) that the brokers keep."""

from __future__ import annotations

import logging
from typing import Final

from downrange.auth.account_sync import AccountSync
from downrange.auth.accounts import Accounts
from downrange.auth.configured_users import INNER_CREDENTIALS
from downrange.auth.user_access_control import AccessSettings, UserAccessControl
from downrange.auth.users import User, UserType
from downrange.client.session import Session
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.settings import ConfigError

log = logging.getLogger(__name__)

_PERIOD_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0


class BrokerAccounts:
    """Copies users and ACLs from a master, again and again.

    Until the first copy nobody may do anything; while no master answers, what was copied last counts. ACLs count here
    whether brokers have authorizationEnabled or not. The server signs with the brokers' own account: brokers give
    passwords to no other, and seal them with its secret.
    """

    def __init__(self, session: Session, clock: Clock) -> None:
        config = session.config
        if not config.access_key or not config.secret_key:
            raise ConfigError(
                f"--broker-accounts needs the brokers' own account ({INNER_CREDENTIALS}): set ROCKETMQ_ACCESS_KEY and "
                "ROCKETMQ_SECRET_KEY"
            )
        inner = User(config.access_key, config.secret_key, UserType.SUPER)
        self._session = session
        self._clock = clock
        self.access_control = UserAccessControl(Accounts(), AccessSettings(""), inner)
        self._trouble: str | None = None
        self._sync = AccountSync(self.access_control, session.invoke)

    async def run(self) -> None:
        """Copy, for ever."""
        while True:
            await self._clock.sleep(_PERIOD_SECONDS if self._trouble is None else _RETRY_SECONDS)
            await self.copy()

    async def copy(self) -> None:
        """Copy once, if a master answers."""
        trouble = await self._copy()
        if trouble is not None and trouble != self._trouble:
            log.warning("users and acls of brokers cannot be copied, trying on: %s", trouble)
        self._trouble = trouble

    async def _copy(self) -> str | None:
        """Copy from the first master that answers; None, or why none did."""
        trouble = "the name server knows no master"
        try:
            masters = await self._session.masters()
        except MQError as error:
            return str(error)
        for master in masters:
            try:
                await self._sync.copy(master.address)
            except MQError as error:
                trouble = f"{master}: {error}"
            else:
                return None
        return trouble
