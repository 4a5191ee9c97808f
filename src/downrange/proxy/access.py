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
from downrange.auth.audit import AuditLog, RefusedCall
from downrange.auth.gate import Gate
from downrange.auth.login_failures import LoginFailures
from downrange.auth.needs import group_need, topic_need
from downrange.clock import Clock
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
_MOST_KNOWN: Final = 10_000

__all__ = ["PUB", "PUB_OR_SUB", "SUB", "CallGuard", "group_need", "topic_need"]


class CallGuard:
    """Checks calls; without access control every call may pass."""

    def __init__(
        self,
        control: AccessControl | None,
        audit: AuditLog | None,
        clock: Clock,
        wait_seconds: float,
        gate: Gate | None = None,
    ) -> None:
        """Logins from an address with too many failed ones wait `wait_seconds`, one after the other; 0: not at all.

        `gate` is that of the broker in this process: it counts what is refused here, too.
        """
        self._control = control
        self._audit = audit or AuditLog()
        self._clock = clock
        self._wait_seconds = wait_seconds
        self._gate = gate
        self._failures = LoginFailures() if gate is None else gate.failures
        self._known: set[str] = set()
        """Connections with a login that went well."""
        self._waiting: set[str] = set()
        self.is_on = control is not None

    async def check(self, caller: Caller, needs: Sequence[Need]) -> None:
        """Raise Refused unless the caller's account has these rights."""
        control = self._control
        if control is None:
            return
        await self._slow_down(caller)
        command = self._equivalent(caller, control)
        try:
            account = control.authenticate(command, caller.host)
            self._remember(caller)
        except BrokerError as error:
            left_out = self._failures.failed(caller.host, self._clock.monotonic())
            self._known.discard(caller.peer)
            if left_out is not None:
                self._audit.call_refused(RefusedCall(caller.call, caller.peer, None, needs, error.remark, left_out))
            raise Refused(Code.UNAUTHORIZED, error.remark) from None
        try:
            control.authorize(account, needs, command, caller.host)
        except BrokerError as error:
            if self._gate is not None:
                self._gate.denied += 1
            self._audit.call_refused(RefusedCall(caller.call, caller.peer, account.name, needs, error.remark))
            raise Refused(Code.UNAUTHORIZED, error.remark) from None

    async def _slow_down(self, caller: Caller) -> None:
        host = caller.host
        if not self._wait_seconds or not self._failures or caller.peer in self._known:
            return
        if not self._failures.is_in_debt(host, self._clock.monotonic()):
            return
        if host in self._waiting:
            raise Refused(Code.UNAUTHORIZED, "too many failed logins from this address, wait a moment")
        self._waiting.add(host)
        try:
            await self._clock.sleep(self._wait_seconds)
        finally:
            self._waiting.discard(host)

    def _remember(self, caller: Caller) -> None:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(caller.peer)

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
