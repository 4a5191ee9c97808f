"""TLS contexts of servers and clients, which follow their files: a renewed certificate needs no restart.

The files are looked at when a connection is made. New ones are taken if they fit together; until then the old ones stay
in use. Connections that are open keep the certificates that they began with.
"""

from __future__ import annotations

import logging
import ssl
import stat
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Final

from downrange.settings import ConfigError, settings_of
from downrange.transport.tls_config import ClientAuth, TlsConfig, TlsMode, resolved

log = logging.getLogger(__name__)

FIRST_BYTE: Final = 0x16
"""A TLS connection begins with this byte, a plain one of RocketMQ with 0: frames have less than 16 MiB."""

_Stamp = tuple[int, int, int] | None


class Tls(ABC):
    """A context that is made again when one of its files has changed. Any thread may call."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError if there is no usable context."""
        self._config = config
        self._files: tuple[Path, ...] = ()
        self._stamps: tuple[_Stamp, ...] = ()
        self._lock = threading.Lock()
        self._context = self._load()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._config!r}>"

    def context(self) -> ssl.SSLContext:
        """The context for a new connection."""
        with self._lock:
            stamps = tuple(map(_stamp, self._files))
            if stamps != self._stamps:
                self._stamps = stamps  # one attempt, and one line in the log, for each change
                try:
                    self._context = self._load()
                except ConfigError as error:
                    log.error("TLS files changed and cannot be used, the old ones stay in use reason=%s", error)
                else:
                    log.info("TLS files changed and are in use files=%s", ", ".join(map(str, self._files)))
            return self._context

    def _load(self) -> ssl.SSLContext:
        config = resolved(self._config)
        _check_test_mode(config)
        self._files = tuple(_paths(config).values())
        self._stamps = tuple(map(_stamp, self._files))  # first: a file that changes meanwhile is read again
        return self._build(config)

    @abstractmethod
    def _build(self, config: TlsConfig) -> ssl.SSLContext: ...


class ServerTls(Tls):
    """The certificate of a server, and whether plain connections are served, too."""

    warns_of_test_mode: ClassVar[bool] = True

    def __init__(self, config: TlsConfig, mode: TlsMode) -> None:
        self.is_enforced = mode is TlsMode.ENFORCING
        super().__init__(config)

    def _build(self, config: TlsConfig) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Each connection makes a whole handshake, so that a client is checked against the files as they are now.
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
        context.num_tickets = 0
        if config.test_mode_enable:
            _load_test_certificate(context)
            if self.warns_of_test_mode:
                log.warning("TLS test mode: the certificate is made up, clients cannot know whom they talk to")
            return context
        if config.server_cert_path is None:
            raise ConfigError(
                "tls.server.certPath is missing: name a certificate and its key, or set tls.server.mode=disabled"
            )
        _load_pair(context, "server", config.server_cert_path, config.server_key_path, config.server_key_password)
        if config.server_need_client_auth is not ClientAuth.NONE:
            _check_clients(context, config)
        return context


class ClientTls(Tls):
    """The servers that a client trusts, and the certificate that it shows to them."""

    def _build(self, config: TlsConfig) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if config.test_mode_enable or not config.client_auth_server:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        else:
            context.check_hostname = config.client_check_host_name
            if config.client_trust_cert_path is None:
                context.load_default_certs()
            else:
                _load_trusted(context, "client", config.client_trust_cert_path)
        if config.client_cert_path is not None:
            _load_pair(context, "client", config.client_cert_path, config.client_key_path, config.client_key_password)
        return context


def server_tls(config: TlsConfig) -> ServerTls | None:
    """The TLS of a server; None when it closes TLS connections. Raises ConfigError if its certificate is unusable."""
    mode = resolved(config).mode
    return None if mode is TlsMode.DISABLED else ServerTls(config, mode)


def outgoing_tls(config: TlsConfig) -> ClientTls | None:
    """The TLS of the connections that a server makes; None when they are plain."""
    return ClientTls(config) if resolved(config).is_enabled else None


def failure(error: OSError) -> str:
    """The reason for which a handshake failed, in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return "it closed the connection during the TLS handshake"
    return error.strerror or str(error)


def client_failure(error: OSError) -> str:
    """The reason for which a client could not connect with TLS, and what to do."""
    reason = failure(error)
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _UNKNOWN_ISSUER:
        return f"{reason}; tls.client.trustCertPath names the issuers to trust"
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return f"{reason}: it takes plain connections only, or refused our certificate"
    return reason


# X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT, ..._DEPTH_ZERO_SELF_SIGNED_CERT, ..._SELF_SIGNED_CERT_IN_CHAIN, ..._LOCALLY
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20})


def _paths(config: TlsConfig) -> dict[str, Path]:
    """Every file that is named, by key."""
    values = {one.key: getattr(config, one.field) for one in settings_of(TlsConfig)}
    return {key: value for key, value in values.items() if isinstance(value, Path)}


def _check_test_mode(config: TlsConfig) -> None:
    """Refuse certificates beside the test mode: in RocketMQ the test mode ignores them."""
    for key in _paths(config):
        if config.test_mode_enable and key != "tls.config.file":
            raise ConfigError(f"tls.test.mode.enable=true and {key} exclude each other: remove one of them")


def _check_clients(context: ssl.SSLContext, config: TlsConfig) -> None:
    wanted = f"tls.server.need.client.auth={config.server_need_client_auth}"
    if not config.server_auth_client:
        raise ConfigError(f"{wanted} and tls.server.authClient=false: a certificate that is not checked proves nothing")
    if config.server_trust_cert_path is None:
        raise ConfigError(f"{wanted} needs tls.server.trustCertPath: the issuers whose clients are let in")
    _load_trusted(context, "server", config.server_trust_cert_path)
    is_required = config.server_need_client_auth is ClientAuth.REQUIRE
    context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL


def _load_pair(context: ssl.SSLContext, side: str, cert: Path, key: Path | None, password: str | None) -> None:
    if key is None:
        raise ConfigError(f"tls.{side}.keyPath is missing: the key of tls.{side}.certPath={cert}")
    _check_readable(f"tls.{side}.certPath", cert)
    _check_readable(f"tls.{side}.keyPath", key)
    if stat.S_IMODE(key.stat().st_mode) & 0o077:
        log.warning("private key can be read by others path=%s what_to_do=chmod 600", key)
    try:
        # With an empty password an encrypted key is an error; without any, OpenSSL would ask at the terminal.
        context.load_cert_chain(cert, key, password or "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = "the key belongs to another certificate"
        else:
            why = f"not a certificate and its key in PEM, or tls.{side}.keyPassword is wrong"
        raise ConfigError(f"tls.{side}.certPath={cert}, tls.{side}.keyPath={key}: {why}") from None


def _load_trusted(context: ssl.SSLContext, side: str, path: Path) -> None:
    _check_readable(f"tls.{side}.trustCertPath", path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigError(f"tls.{side}.trustCertPath={path}: no certificates in PEM") from None


def _load_test_certificate(context: ssl.SSLContext) -> None:
    from downrange.transport.certificates import self_signed  # only here: it needs a package that few have

    with self_signed() as (cert, key):
        context.load_cert_chain(cert, key)


def _check_readable(key: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{key}={path}: {(error.strerror or str(error)).lower()}") from None


def _stamp(path: Path) -> _Stamp:
    """Changes with every change of a file; None when it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
