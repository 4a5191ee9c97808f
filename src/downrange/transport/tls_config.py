"""TlsConfig: the `tls.*` keys of RocketMQ, for servers and for clients.

RocketMQ takes them as properties of the Java process; here they stand in `broker.conf` or in the file of a name server.
Defaults are safe where RocketMQ's are not: no certificate that nobody chose, every certificate is checked, and the host
name of a server is compared with its certificate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from downrange.settings import (
    ConfigError,
    check_known,
    configure,
    read_properties,
    setting,
    settings_of,
)


class TlsMode(StrEnum):
    """What a server does with TLS connections and with plain ones."""

    DISABLED = "disabled"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


class ClientAuth(StrEnum):
    """Whether a server wants the certificate of a client."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRE = "require"

    @classmethod
    def _missing_(cls, value: object) -> ClientAuth | None:
        """As in RocketMQ, upper and lower case are equal."""
        return next((one for one in cls if str(value).lower() == one.value), None)


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """The keys as they were given; `resolved` adds those of `tls.config.file`."""

    server_mode: TlsMode | None = setting(
        None,
        "TLS connections: disabled closes them, permissive serves both TLS and plain, enforcing closes plain ones. "
        "Default: permissive if there is a certificate, else disabled.",
        key="tls.server.mode",
    )
    enable: bool | None = setting(
        None,
        "Use TLS for connections that are made from here: to name servers, to a master. Default: true if "
        "tls.server.mode=enforcing, else false.",
        key="tls.enable",
        aliases=("useTLS",),
    )
    config_file: Path | None = setting(
        None,
        "Properties file with any of the keys below; it wins over this file, and is read again when it changes.",
        key="tls.config.file",
    )
    test_mode_enable: bool = setting(
        False,
        "For trying things out: a server makes a certificate for itself, a client trusts every server. Needs the "
        "package cryptography. RocketMQ's default is true.",
        key="tls.test.mode.enable",
    )
    server_need_client_auth: ClientAuth = setting(
        ClientAuth.NONE, "Whether clients must show a certificate.", key="tls.server.need.client.auth"
    )
    server_key_path: Path | None = setting(None, "Private key, PEM.", key="tls.server.keyPath")
    server_cert_path: Path | None = setting(
        None, "Certificate, and those of its issuers behind it, PEM.", key="tls.server.certPath"
    )
    server_key_password: str | None = setting(
        None, "Password of an encrypted key.", key="tls.server.keyPassword", is_secret=True
    )
    server_auth_client: bool = setting(
        True,
        "Check the certificates of clients. false is refused where clients show one: unchecked it proves nothing. "
        "RocketMQ's default is false.",
        key="tls.server.authClient",
    )
    server_trust_cert_path: Path | None = setting(
        None, "Issuers whose client certificates are accepted, PEM.", key="tls.server.trustCertPath"
    )
    client_key_path: Path | None = setting(None, "Private key, PEM, of clients.", key="tls.client.keyPath")
    client_cert_path: Path | None = setting(
        None, "Certificate that clients show if they are asked, PEM.", key="tls.client.certPath"
    )
    client_key_password: str | None = setting(
        None, "Password of an encrypted key.", key="tls.client.keyPassword", is_secret=True
    )
    client_auth_server: bool = setting(
        True,
        "Check the certificates of servers. false trusts everyone: encrypted, but perhaps with the wrong server. "
        "RocketMQ's default is false.",
        key="tls.client.authServer",
    )
    client_trust_cert_path: Path | None = setting(
        None, "Issuers whose servers are trusted, PEM. Default: those of the system.", key="tls.client.trustCertPath"
    )
    client_check_host_name: bool = setting(
        True,
        "Compare the address of a server with its certificate. Not a key of RocketMQ, which never does.",
        key="tls.client.checkHostName",
    )

    @property
    def mode(self) -> TlsMode:
        """The mode of a server; to be asked after `resolved`."""
        if self.server_mode is not None:
            return self.server_mode
        has_certificate = self.test_mode_enable or self.server_cert_path is not None
        return TlsMode.PERMISSIVE if has_certificate else TlsMode.DISABLED

    @property
    def is_enabled(self) -> bool:
        """Whether the connections that are made from here use TLS."""
        return self.mode is TlsMode.ENFORCING if self.enable is None else self.enable


def resolved(config: TlsConfig) -> TlsConfig:
    """With the keys of `tls.config.file`, which win; raises ConfigError."""
    if config.config_file is None:
        return config
    found = read_properties(config.config_file)
    for key in _NOT_IN_THE_FILE & found.keys():
        raise ConfigError(f"{key} does not belong into a tls.config.file, but beside it{found[key].place}")
    check_known(found, [TlsConfig])
    read = configure(TlsConfig, found)
    named = (one.field for one in settings_of(TlsConfig) if one.key in found)
    return replace(config, **{field: getattr(read, field) for field in named})


def given_keys(config: TlsConfig) -> dict[str, str]:
    """The keys that differ from their defaults, as they stand in a `tls.config.file`."""
    values = {one.key: (getattr(config, one.field), getattr(NO_TLS, one.field)) for one in settings_of(TlsConfig)}
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, (value, default) in values.items()
        if value != default and key not in _NOT_IN_THE_FILE
    }


def is_tls_key(key: str) -> bool:
    return any(key in (one.key, *one.aliases) for one in settings_of(TlsConfig))


NO_TLS: Final = TlsConfig()
_NOT_IN_THE_FILE: Final = frozenset({"tls.server.mode", "tls.enable", "useTLS", "tls.config.file"})
