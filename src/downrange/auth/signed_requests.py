"""The quick way for requests that repeat: the signature is checked, the decision is remembered.

A key stands for one decision: account, address of the peer, and how a request of one code touches one topic and group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from downrange.compiled import accelerated
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command
from downrange.protocol.framing import Frame

if TYPE_CHECKING:
    from downrange.auth.guard import Origin

_PORT_SIZE: Final = 4
_FIELDS: Final[Mapping[int, tuple[str, str]]] = {
    RequestCode.SEND_MESSAGE: ("topic", ""),
    RequestCode.SEND_MESSAGE_V2: ("b", ""),
    RequestCode.SEND_BATCH_MESSAGE: ("b", ""),
    RequestCode.PULL_MESSAGE: ("topic", "consumerGroup"),
    RequestCode.LITE_PULL_MESSAGE: ("topic", "consumerGroup"),
}
"""The names of the fields with topic and group, by request code."""


def allowed_key(account: str, command: Command, peer_host: bytes) -> bytes | None:
    """The key of the decision about a request that may repeat; None for a code whose requests are always looked at."""
    names = _FIELDS.get(command.code)
    if names is None:
        return None
    fields = command.ext_fields
    texts = (account, str(command.code), *(fields.get(name, "") for name in names))
    host = peer_host[:-_PORT_SIZE]
    return b"\0".join((bytes((len(host),)) + host, *(text.encode() for text in texts)))


@accelerated
def hmac_states(secret: bytes) -> bytes:
    """The part of an HMAC-SHA1 that depends on the secret alone. Python's own functions take the secret itself."""
    return secret


@accelerated
def first_not_allowed(
    frames: Sequence[Frame],
    origins: Sequence[Origin],
    at: int,
    stop: int,
    keys: Mapping[bytes, bytes],
    allowed: set[bytes],
) -> int:
    """The position of the first request of `frames[at:stop]` that is not signed well or whose key is not in `allowed`.

    `keys` has the `hmac_states` of each access key. This function, in Python, leaves every request to be looked at.
    """
    return at
