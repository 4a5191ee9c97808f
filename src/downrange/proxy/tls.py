"""TLS of the gRPC port. Without a certificate of its own it has one that signed itself: most clients accept any."""

from __future__ import annotations

import logging
import ssl
from dataclasses import replace

from downrange.settings import ConfigError
from downrange.transport.tls import ServerTls
from downrange.transport.tls_config import TlsConfig, TlsMode, resolved

log = logging.getLogger(__name__)


class GrpcTls(ServerTls):
    """The certificate of a gRPC server; clients and server agree on HTTP/2 in the handshake."""

    def _build(self, config: TlsConfig) -> ssl.SSLContext:
        context = super()._build(config)
        context.set_alpn_protocols(["h2"])
        return context


class MadeUpTls(GrpcTls):
    """A certificate that signed itself, where there is none: what clients expect that accept any."""

    warns_of_test_mode = False


def grpc_tls(config: TlsConfig) -> GrpcTls | None:
    """The TLS of a gRPC port; None when it is disabled, or when no certificate can be made."""
    mode = resolved(config).mode
    if config.server_mode is TlsMode.DISABLED:
        return None
    if mode is not TlsMode.DISABLED:
        return GrpcTls(config, mode)
    try:
        return MadeUpTls(replace(config, test_mode_enable=True, server_mode=TlsMode.PERMISSIVE), TlsMode.PERMISSIVE)
    except ConfigError as error:
        log.warning("gRPC port without TLS reason=%s", error)
        return None
