"""ProxyConfig: where a gRPC server listens, and how clients reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from downrange.auth.gate import WAIT_SECONDS
from downrange.proxy.http2.limits import Http2Limits
from downrange.transport.tls_config import NO_TLS, TlsConfig


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    bind_address: str = "127.0.0.1"
    port: int = 8081
    """0 takes a free one."""
    advertised_host: str = ""
    """How clients reach this server if they do not say; empty: `bind_address`."""
    failed_login_wait_seconds: float = WAIT_SECONDS
    """How long a login from an address with many failed ones waits."""
    tls: TlsConfig = NO_TLS
    """The certificate; without one, TLS connections get one that signed itself."""
    acl_file: Path | None = None
    """The accounts (plain_acl.yml) of clients of a server that stands alone."""
    has_broker_accounts: bool = False
    """Whether clients of a server that stands alone have the accounts that brokers keep (ACL 2.0). Without either kind
    of accounts everybody may do everything."""
    metrics_port: int = -1
    """The port of the page /metrics of a server that stands alone; 0 takes a free one, -1 is none."""
    limits: Http2Limits = field(default_factory=Http2Limits)
