"""The login at the port for slaves: which peers may get the log. Pure but for reading the secret.

    slave   "DRLOGIN1"  broker id (8)  nonce (32)
    master  nonce (32)  proof (32)
    slave   proof (32), then reports as without a login

A proof is the HMAC-SHA256 of a side's name, the broker id and both nonces, with a secret that both sides know. RocketMQ
has no login: its slaves begin with a report, whose first byte is 0, and need an address that the master allows.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from downrange.auth.remote_address import Addresses, matches, parse_addresses
from downrange.broker.replication.errors import ReplicationError
from downrange.settings import ConfigError
from downrange.store.config import StoreConfig

GREETING: Final = b"DRLOGIN1"
NONCE_SIZE: Final = 32
PROOF_SIZE: Final = 32
SHORTEST_SECRET: Final = 16
_LARGEST_FILE: Final = 4096
_ID: Final = struct.Struct(">q")
_HELLO_SIZE: Final = len(GREETING) + _ID.size + NONCE_SIZE


class LoginFailed(ReplicationError):
    """The peer did not prove that it knows the secret."""


def proof(secret: bytes, side: bytes, broker_id: int, slave_nonce: bytes, master_nonce: bytes) -> bytes:
    return hmac.digest(secret, side + _ID.pack(broker_id) + slave_nonce + master_nonce, "sha256")


@dataclass(frozen=True, slots=True)
class SlaveAccess:
    """The slaves that a master accepts: by address, by login, or all."""

    addresses: Addresses = ()
    secret: bytes | None = field(default=None, repr=False)

    @property
    def is_limited(self) -> bool:
        """Whether not everybody who reaches the port gets the log."""
        return bool(self.addresses) or self.secret is not None

    def may_follow(self, address: str) -> bool:
        """Whether an address gets the log without a login."""
        return not self.is_limited or matches(self.addresses, address)

    def may_connect(self, address: str) -> bool:
        """Whether an address gets the log, perhaps after a login."""
        return self.secret is not None or self.may_follow(address)


def slave_access(config: StoreConfig) -> SlaveAccess:
    """The slaves that a configuration allows. Raises ConfigError."""
    try:
        addresses = tuple(one for part in config.ha_allowed_slave_addresses.split(";") for one in parse_addresses(part))
    except ValueError as error:
        raise ConfigError(f"haAllowedSlaveAddresses: {error}") from None
    return SlaveAccess(addresses, read_secret(config.ha_secret_file))


def read_secret(path: Path | None) -> bytes | None:
    """The secret in a file, without blanks around it; None for no file. Raises ConfigError."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            secret = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"haSecretFile={path}: {error.strerror or error}") from None
    if len(secret) > _LARGEST_FILE:
        raise ConfigError(f"haSecretFile={path}: more than {_LARGEST_FILE} bytes are no secret")
    if len(secret.strip()) < SHORTEST_SECRET:
        raise ConfigError(f"haSecretFile={path}: a secret has {SHORTEST_SECRET} characters or more")
    return secret.strip()


class MasterLogin:
    """The master's side of one login.

    Holds always: `is_done` is true only if the peer proved that it knows the secret, or need not.
    """

    def __init__(self, secret: bytes | None, nonce: bytes, *, is_required: bool) -> None:
        self._secret = secret
        self._nonce = nonce
        self._is_required = is_required
        self._data = b""
        self._slave_nonce = b""
        self._claimed_id = 0
        self.broker_id: int | None = None
        """The broker id of the slave, when it has logged in."""
        self.is_done = False

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Take bytes of the slave; return those to send to it, and those that come behind the login."""
        self._data += data
        if not self._data:
            return b"", b""
        if not self._slave_nonce:
            if self._data[0] != GREETING[0]:
                return b"", self._without_login()
            if not GREETING.startswith(self._data[: len(GREETING)]):
                raise LoginFailed("it speaks another protocol")
            return self._greeted() if len(self._data) >= _HELLO_SIZE else (b"", b"")
        if len(self._data) < PROOF_SIZE:
            return b"", b""
        assert self._secret is not None
        claimed = self._claimed_id
        given, rest = self._data[:PROOF_SIZE], self._data[PROOF_SIZE:]
        if not hmac.compare_digest(given, proof(self._secret, b"slave", claimed, self._slave_nonce, self._nonce)):
            raise LoginFailed("its proof is wrong: it has another haSecretFile")
        self.broker_id, self.is_done = claimed, True
        return b"", rest

    def _without_login(self) -> bytes:
        if self._is_required:
            raise LoginFailed("it does not log in and its address is not in haAllowedSlaveAddresses")
        self.is_done = True
        return self._data

    def _greeted(self) -> tuple[bytes, bytes]:
        if self._secret is None:
            raise LoginFailed("it wants to log in, but this master has no haSecretFile")
        if len(self._data) > _HELLO_SIZE:  # a slave waits for the answer
            raise LoginFailed("it speaks another protocol")
        (self._claimed_id,) = _ID.unpack_from(self._data, len(GREETING))
        self._slave_nonce, self._data = self._data[-NONCE_SIZE:], b""
        mine = proof(self._secret, b"master", self._claimed_id, self._slave_nonce, self._nonce)
        return self._nonce + mine, b""


class SlaveLogin:
    """The slave's side of one login: `greeting` is sent first, then the answer of `feed`, then reports."""

    def __init__(self, secret: bytes, broker_id: int, nonce: bytes) -> None:
        self._secret = secret
        self._broker_id = broker_id
        self._nonce = nonce
        self._data = b""

    @property
    def greeting(self) -> bytes:
        return GREETING + _ID.pack(self._broker_id) + self._nonce

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes of the master; the bytes to send to it, or None while its answer is not complete."""
        self._data += data
        if len(self._data) < NONCE_SIZE + PROOF_SIZE:
            return None
        master_nonce, given = self._data[:NONCE_SIZE], self._data[NONCE_SIZE:]
        if not hmac.compare_digest(given, proof(self._secret, b"master", self._broker_id, self._nonce, master_nonce)):
            raise LoginFailed("the master did not prove who it is: it has another haSecretFile")
        return proof(self._secret, b"slave", self._broker_id, self._nonce, master_nonce)
