"""The account of a server's own parts that ask the server over the wire, as the gRPC port beside a broker does."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence

from downrange.auth.access_control import AccessControl, Account, Need
from downrange.protocol.command import Command
from downrange.protocol.errors import NoPermission
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, signature


class InnerAccount:
    """Access control with one more account, which may do everything. Its secret is made anew in every process."""

    def __init__(self, control: AccessControl) -> None:
        self.control = control
        """The accounts of users."""
        self.access_key = f"inner-{secrets.token_hex(8)}"
        self.secret_key = secrets.token_hex(32)

    def __repr__(self) -> str:
        return f"<InnerAccount beside {self.control!r}>"

    @property
    def generation(self) -> int:
        return self.control.generation

    @property
    def secrets(self) -> Mapping[str, bytes]:
        return {**self.control.secrets, self.access_key: self.secret_key.encode()}

    def authenticate(self, command: Command, address: str) -> Account:
        fields = command.ext_fields
        if fields.get(ACCESS_KEY) != self.access_key:
            return self.control.authenticate(command, address)
        expected = signature(fields, command.body_bytes, self.secret_key.encode())
        if not hmac.compare_digest(expected.encode(), fields.get(SIGNATURE, "").encode("utf-8", "surrogatepass")):
            raise NoPermission("check signature failed.")
        return Account(self.access_key, is_admin=True)

    def authorize(self, account: Account, needs: Sequence[Need], command: Command, address: str) -> None:
        if account.name != self.access_key:
            self.control.authorize(account, needs, command, address)
