"""Signatures of requests, for clusters with access control. [AclClientRPCHook]

Signed are the values of all ext fields in the order of their names, and the body: HMAC-SHA1 with the secret key, in
Base64. The secret itself never travels.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Mapping
from typing import Final

import msgspec

from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"  # noqa: S105  the name of a field
SIGNATURE: Final = "Signature"
_QUERY: Final = int(RequestCode.QUERY_MESSAGE)
_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
_VERSION_4_9_3: Final = 399
_ZONE_FIELDS: Final = frozenset({"__ZONE_NAME", "__ZONE_MODE"})
"""Fields that Java clients of 5.x add after they signed. They mean nothing to our servers."""


class Signer:
    """Signs the requests of one user."""

    def __init__(self, access_key: str, secret_key: str, security_token: str | None = None) -> None:
        self.access_key = access_key
        self._secret = secret_key.encode()
        self._token = security_token

    def __repr__(self) -> str:
        return f"<Signer {self.access_key}>"

    def sign(self, command: Command) -> Command:
        """A copy of the request with the user's name and signature."""
        fields = {**command.ext_fields, ACCESS_KEY: self.access_key}
        if self._token is not None:
            fields[SECURITY_TOKEN] = self._token
        signed: Mapping[str, str] = fields
        version = command.version
        if command.code == _QUERY:
            # Brokers of 4.x check queries without this field, those of 5.x only for clients up to 4.9.3.
            signed = {name: value for name, value in fields.items() if name != _UNIQUE_KEY_QUERY}
            version = min(version, _VERSION_4_9_3)
        text = signature(signed, command.body_bytes, self._secret)
        return msgspec.structs.replace(command, raw_ext={**fields, SIGNATURE: text}, version=version)


def without_signature(fields: Mapping[str, str]) -> dict[str, str]:
    """The fields without those that say who asks: a client must not get the signature of an operator."""
    return {name: value for name, value in fields.items() if name not in (ACCESS_KEY, SECURITY_TOKEN, SIGNATURE)}


def signature(fields: Mapping[str, str], body: bytes, secret: bytes) -> str:
    # Java compares names by UTF-16 units. Field names are ASCII, where that is Python's order.
    values = "".join(fields[name] for name in sorted(fields) if name != SIGNATURE)
    return base64.b64encode(hmac.digest(secret, values.encode() + body, "sha1")).decode()


def is_signed_with(command: Command, secret: bytes) -> bool:
    """Whether a request has the signature that this secret makes; the comparison takes as long for a wrong one."""
    fields = command.ext_fields
    given = fields.get(SIGNATURE, "").encode()
    unsigned = _ZONE_FIELDS | {_UNIQUE_KEY_QUERY} if command.code == _QUERY else _ZONE_FIELDS
    if hmac.compare_digest(signature(fields, command.body_bytes, secret).encode(), given):
        return True
    if unsigned.isdisjoint(fields):
        return False
    rest = {name: value for name, value in fields.items() if name not in unsigned}
    return hmac.compare_digest(signature(rest, command.body_bytes, secret).encode(), given)
