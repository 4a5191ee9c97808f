"""The file with the users and ACLs of a broker: `config/auth.json` in its store, readable by its owner only.

RocketMQ 5.3 keeps them in two RocksDB directories, `config/users` and `config/acls`, which this broker does not open.
There is no older copy beside the file: passwords of users that were deleted are gone, and a deleted user cannot come
back from a copy.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from downrange.auth.account_table import accounts_of, encoded_accounts
from downrange.auth.accounts import Accounts
from downrange.auth.policies import Acl
from downrange.auth.private_file import OWNER_ONLY, replace_file
from downrange.auth.users import AccessRuleError, User
from downrange.protocol.bodies.body import BodyError, decode_body
from downrange.protocol.bodies.users import AccountTable
from downrange.settings import ConfigError

log = logging.getLogger(__name__)

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class AccountFile:
    """Reads and writes the file. Errors of reading never show what stands in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Accounts:
        """The users and ACLs saved last, none at first; their changes are saved here."""
        table = self._load()
        try:
            users, acls = accounts_of(table)
        except AccessRuleError as error:
            raise ConfigError(f"{self.path} cannot be used: {error}; repair it") from None
        accounts = Accounts()
        accounts.replace_all(users, acls)
        accounts.save = self.save
        return accounts

    def _load(self) -> AccountTable:
        try:
            mode = self.path.stat().st_mode
            text = self.path.read_bytes()
        except FileNotFoundError:
            return AccountTable()
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror or error}") from None
        if mode & _OTHERS:
            log.warning("passwords were readable by others, and are not any more file=%s", self.path)
            self.path.chmod(OWNER_ONLY)
        try:
            return decode_body(AccountTable, text)
        except BodyError:
            raise ConfigError(f"{self.path} is damaged; restore it from a backup, or copy it from a slave") from None

    def save(self, users: Iterable[User], acls: Iterable[Acl]) -> None:
        """Replace the file; the new one is on the disk when this returns."""
        text = msgspec.json.format(encoded_accounts(users, acls))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, text)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}; nothing was changed") from None
