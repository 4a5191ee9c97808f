"""Copies users and ACLs from a master to its slave, so that they are the same after a failover, or to a gRPC server.

The master sends the table sealed with the secret of the brokers' own account, for a challenge of this server: neither
can its answer be read or forged on the way, nor can an old one bring back a user that was deleted.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Final

from downrange.auth.account_table import accounts_of
from downrange.auth.user_access_control import UserAccessControl
from downrange.protocol.bodies.body import decode_body
from downrange.protocol.bodies.users import AccountTable, ListUsersRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import broker_error
from downrange.protocol.sealing import unseal

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS: Final = 3.0
_CHALLENGE_BYTES: Final = 16


# Asks the server at an address, with a signed request, for at most so many seconds.
Ask = Callable[[str, Command, float], Awaitable[Command]]


class AccountSync:
    """Keeps the accounts of a server a copy of a master's."""

    def __init__(self, access: UserAccessControl, ask: Ask) -> None:
        self._access = access
        self._ask = ask
        self._taken: tuple[bytes, int] = b"", -1
        """The table that the master sent last, and the generation that it made of our accounts."""

    async def copy(self, master: str) -> None:
        """Copy the accounts once."""
        inner = self._access.inner
        if inner is None:
            return
        challenge = secrets.token_hex(_CHALLENGE_BYTES)
        command = request(RequestCode.AUTH_LIST_USER, ListUsersRequest(challenge=challenge))
        reply = await self._ask(master, command, _TIMEOUT_SECONDS)
        if reply.code != 0:
            raise broker_error(reply.code, reply.remark)
        text, accounts = unseal(reply.body_bytes, inner.password.encode(), challenge), self._access.accounts
        if (text, accounts.generation) == self._taken:
            return
        before, table = accounts.generation, decode_body(AccountTable, text)
        accounts.replace_all(*accounts_of(table))
        self._taken = text, accounts.generation
        if accounts.generation != before:
            log.info("users and acls copied master=%s users=%d acls=%d", master, len(table.users), len(table.acls))
