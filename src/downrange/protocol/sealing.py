"""Texts on their way between servers that share a secret, as the passwords of users from a master to its slaves.

A sealed text can be read and made with the secret only: an attacker who records it, or answers in the server's place,
gains nothing. It answers one challenge: an old one that is sent again is refused.

The key stream is SHAKE256 of key and nonce, the seal HMAC-SHA256 over challenge, nonce and hidden text; the two keys
come from the secret.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from downrange.model.errors import MQError

NONCE_SIZE: Final = 16
_SEAL_SIZE: Final = 32


class SealError(MQError):
    """A text was not sealed with this secret, or not for this challenge."""


def seal(text: bytes, secret: bytes, challenge: str, nonce: bytes) -> bytes:
    """The text, hidden from everybody without the secret. A nonce must never be used again with one secret."""
    hidden = _hide(text, secret, nonce)
    return nonce + _seal(nonce + hidden, secret, challenge) + hidden


def unseal(sealed: bytes, secret: bytes, challenge: str) -> bytes:
    """The text that was sealed with the secret for the challenge."""
    nonce, rest = sealed[:NONCE_SIZE], sealed[NONCE_SIZE:]
    found, hidden = rest[:_SEAL_SIZE], rest[_SEAL_SIZE:]
    if not hmac.compare_digest(found, _seal(nonce + hidden, secret, challenge)):
        raise SealError("an answer was not sealed with our secret key")
    return _hide(hidden, secret, nonce)


def _seal(data: bytes, secret: bytes, challenge: str) -> bytes:
    key = hmac.digest(secret, b"downrange seal", "sha256")
    return hmac.digest(key, hashlib.sha256(challenge.encode()).digest() + data, "sha256")


def _hide(text: bytes, secret: bytes, nonce: bytes) -> bytes:
    """The text with the key stream over it; hiding a hidden text shows it."""
    key = hmac.digest(secret, b"downrange key stream", "sha256")
    stream = hashlib.shake_256(key + nonce).digest(len(text))
    return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")
