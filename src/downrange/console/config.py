"""What a console is started with."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from downrange.client.config import ClientConfig
from downrange.console.schedule import Pace
from downrange.settings import ConfigError


class LoginKind(StrEnum):
    """How people prove who they are."""

    NONE = "none"
    FILE = "file"
    ACL = "acl"
    HEADER = "header"


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may come in, and what they may see."""

    login: LoginKind = LoginKind.NONE
    users_file: Path | None = None
    proxy_addresses: tuple[str, ...] = ()
    """Addresses from which the headers of an authenticating proxy are believed."""
    user_header: str = "x-forwarded-user"
    role_header: str = "x-forwarded-role"
    public_url: str | None = None
    read_only: bool = False
    mask: str | None = None
    """Regular expression: names of properties and JSON fields whose values viewers do not see."""
    show_bodies: bool = True
    allow_export: bool = True

    def __post_init__(self) -> None:
        if self.login is LoginKind.FILE and self.users_file is None:
            raise ConfigError("--auth file needs --users FILE; `downrange console add-user` makes one")
        if self.login is LoginKind.HEADER and not self.proxy_addresses:
            raise ConfigError("--auth header needs --proxy ADDRESS: from everybody else the headers are not believed")
        if self.public_url is not None and urlsplit(self.public_url).scheme not in ("http", "https"):
            raise ConfigError(f"--public-url {self.public_url}: expected http://… or https://…")
        if self.mask is not None:
            try:
                re.compile(self.mask)
            except re.error as error:
                raise ConfigError(f"--mask {self.mask}: not a regular expression: {error}") from None

    @property
    def public_host(self) -> str | None:
        return None if self.public_url is None else urlsplit(self.public_url).hostname


@dataclass(frozen=True, slots=True)
class ConsoleConfig:
    """One console: its clusters, its address, who may use it, and the files it keeps."""

    clusters: dict[str, ClientConfig]
    bind: str = "127.0.0.1"
    port: int = 8082
    access: AccessConfig = field(default_factory=AccessConfig)
    history: Path | None = None
    audit_log: Path | None = None
    pace: Pace = field(default_factory=Pace)
    metrics: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses of the metrics of brokers, by cluster."""

    def __post_init__(self) -> None:
        for name in self.clusters:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                raise ConfigError(f"cluster {name!r}: a name has letters, digits, - and _, at most 64")

    @property
    def audit_path(self) -> Path | None:
        """The file of the audit log: the one that was named, else one beside the history."""
        if self.audit_log is None and self.history is not None:
            return self.history.with_name(self.history.name + ".audit.jsonl")
        return self.audit_log


def parse_clusters(texts: list[str]) -> dict[str, ClientConfig]:
    """`host:9876` or `prod=ns1:9876;ns2:9876`, each a cluster. Without a text the usual place of name servers."""
    found: dict[str, ClientConfig] = {}
    for text in texts or [""]:
        name, equals, addresses = text.rpartition("=")
        name = name if equals else "local" if not found else f"cluster-{len(found) + 1}"
        if name in found:
            raise ConfigError(f"-n {text}: there is a cluster {name} already; give each a name of its own")
        found[name] = ClientConfig.of(addresses or None)
    return found


def parse_metrics(texts: list[str], clusters: Collection[str]) -> dict[str, tuple[str, ...]]:
    """`http://broker:5557/metrics` or `prod=http://…`: addresses by cluster. One cluster needs no name."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals or "/" in name:
            name, address = next(iter(clusters)) if len(clusters) == 1 else "", text
        if name not in clusters:
            raise ConfigError(f"--metrics {text}: say for which cluster, {' or '.join(clusters)}, as NAME=http://…")
        if urlsplit(address).scheme not in ("http", "https") or not urlsplit(address).hostname:
            raise ConfigError(f"--metrics {text}: expected http://HOST:5557/metrics or https://…")
        found[name] = (*found.get(name, ()), address)
    return found


def is_address(host: str) -> bool:
    """Whether a host is an address, or `localhost`: no name that somebody else's DNS could point here."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return True
