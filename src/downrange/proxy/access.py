"""Access control of gRPC calls: whose signature is in the headers, and may the account do what the call asks for?

The decision is that of the remoting protocol: after the signature of the call was checked, an equivalent remoting
request is signed with the account's secret and handed to the same `AccessControl`.
"""

from __future__ import annotations

import binascii
import hmac
from collections.abc import Sequence
from typing import Final

from downrange.auth.access_control import AccessControl, Action, Need
from downrange.auth.needs import group_need, topic_need
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import BrokerError
from downrange.protocol.signing import ACCESS_KEY, SIGNATURE, Signer
from downrange.proxy.caller import Caller
from downrange.proxy.errors import Refused
from downrange.proxy.wire.enums import Code

PUB: Final = frozenset({Action.PUB})
SUB: Final = frozenset({Action.SUB})
PUB_OR_SUB: Final = PUB | SUB

__all__ = ["PUB", "PUB_OR_SUB", "SUB", "CallGuard", "group_need", "topic_need"]


class CallGuard:
    """Checks calls; without access control every call may pass."""

    def __init__(self, control: AccessControl | None) -> None:
        self._control = control
        self.is_on = control is not None

    def check(self, caller: Caller, needs: Sequence[Need]) -> None:
        """Raise Refused unless the caller's account has these rights."""
        control = self._control
        if control is None:
            return
        command = self._equivalent(caller, control)
        try:
            account = control.authenticate(command, caller.host)
            control.authorize(account, needs, command, caller.host)
        except BrokerError as error:
            raise Refused(Code.UNAUTHORIZED, error.remark) from None

    def _equivalent(self, caller: Caller, control: AccessControl) -> Command:
        """A remoting request that is signed if and only if the call is."""
        unsigned = request(RequestCode.SEND_MESSAGE_V2)
        header = caller.header(b"authorization")
        if not header:
            return unsigned
        user, given = read_authorization(header)
        date = caller.headers.get(b"x-mq-date-time")
        if date is None:
            raise Refused(Code.UNAUTHORIZED, "datetime is null.")
        if not user:
            return unsigned
        secret = control.secrets.get(user)
        if secret is not None and hmac.compare_digest(hmac.digest(secret, date, "sha1"), given):
            return Signer(user, secret.decode()).sign(unsigned)
        return request(RequestCode.SEND_MESSAGE_V2, ext_fields={ACCESS_KEY: user, SIGNATURE: "wrong"})


def read_authorization(header: str) -> tuple[str, bytes]:
    """The user and the signature of `MQv2-HMAC-SHA1 Credential=user/…, SignedHeaders=…, Signature=hex`."""
    _, separator, rest = header.partition(" ")
    if not separator:
        raise Refused(Code.UNAUTHORIZED, "authentication header is incorrect.")
    fields = {}
    for part in rest.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator:
            raise Refused(Code.UNAUTHORIZED, "authentication keyValues length is incorrect, actual length=1.")
        fields[name.strip()] = value.strip()
    user = fields.get("Credential", "").partition("/")[0]
    try:
        return user, binascii.unhexlify(fields.get("Signature", ""))
    except (binascii.Error, ValueError):
        return user, b""
