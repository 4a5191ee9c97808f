"""The gRPC port of a broker process, and `downrange proxy`, the gRPC port of a whole cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from downrange.cli.options import TlsFile, TlsMode
from downrange.settings import ConfigError

if TYPE_CHECKING:
    from downrange.broker.app import RunningBroker
    from downrange.proxy.app import RunningProxy


@asynccontextmanager
async def grpc_beside(running: RunningBroker) -> AsyncIterator[int | None]:
    """The gRPC server of a broker, in its process; gives its port, or None when the configuration wants none."""
    from downrange.client.config import ClientConfig
    from downrange.transport.errors import ListenFailed
    from downrange.transport.tls_config import resolved

    config = running.config.broker
    if config.grpc_server_port < 0 or config.broker_id:
        yield None
        return
    try:
        from downrange.proxy.app import grpc_server
        from downrange.proxy.config import ProxyConfig
    except ImportError as error:
        typer.echo(
            f"downrange: warning: no gRPC port: the package {error.name} is missing: pip install 'downrange[grpc]'",
            err=True,
        )
        yield None
        return
    wanted = ProxyConfig(
        config.bind_address,
        config.grpc_server_port,
        advertised_host=config.broker_ip1,
        failed_login_wait_seconds=config.failed_login_wait_mills / 1000,
        tls=config.tls,
    )
    key, secret = running.own_account or (None, None)
    cluster = ClientConfig(
        config.namesrv_addresses,
        "of the broker",
        route_seconds=10.0,
        access_key=key,
        secret_key=secret,
        use_tls=resolved(config.tls).is_enabled,
        tls=config.tls,
    )
    try:
        async with grpc_server(
            wanted, cluster, access=running.access.control, audit=running.audit, gate=running.gate
        ) as server:
            running.statistics.grpc = server.figures
            yield server.port
    except ListenFailed as error:
        raise ListenFailed(f"{error}; --grpc-port takes another port for gRPC clients, or -1 for none") from None


def run(
    namesrv: str | None = typer.Option(None, "--namesrv", "-n", help="Name servers, separated by ';'. [$NAMESRV_ADDR]"),
    port: int = typer.Option(8081, "--port", "-p", min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    bind: str = typer.Option("127.0.0.1", "--bind", "-b", help="Address to listen on."),
    advertise: str = typer.Option("", "--advertise", help="Host by which clients reach this server. [--bind]"),
    acl_file: Path | None = typer.Option(
        None,
        "--acl-file",
        help="File with the accounts of clients, a plain_acl.yml. Without accounts everybody may do everything.",
    ),
    broker_accounts: bool = typer.Option(
        False,
        "--broker-accounts",
        help="Accounts of clients are the users that the brokers keep (ACL 2.0); needs the brokers' own account.",
    ),
    metrics_port: int = typer.Option(
        -1, "--metrics-port", min=-1, max=65535, help="Port of /metrics; 0 takes a free one, -1 is none."
    ),
    tls_mode: TlsMode = None,
    tls_config: TlsFile = None,
    insecure: bool = typer.Option(False, "--insecure", help="Allow an address that other machines can reach."),
    log_level: str = typer.Option("INFO", "--log-level", help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run a gRPC server in front of a cluster until it is stopped with SIGTERM or Ctrl-C."""
    from dataclasses import replace

    from downrange.cli.process import check_bind, overrides, serve, start_logging
    from downrange.client.config import ClientConfig
    from downrange.settings import configure
    from downrange.transport import tls_config as keys

    try:
        from downrange.proxy.app import grpc_server
        from downrange.proxy.config import ProxyConfig
    except ImportError as error:
        raise ConfigError(f"the package {error.name} is missing: pip install 'downrange[grpc]'") from None
    tls = configure(keys.TlsConfig, overrides(**{"tls.server.mode": tls_mode, "tls.config.file": tls_config}))
    is_enforced = keys.resolved(tls).mode is keys.TlsMode.ENFORCING
    if acl_file is not None and broker_accounts:
        raise ConfigError("--acl-file and --broker-accounts: choose one of the two")
    has_accounts = acl_file is not None or broker_accounts
    check_bind(
        bind, {"--acl-file or --broker-accounts": has_accounts, "--tls-mode enforcing": is_enforced}, insecure=insecure
    )
    start_logging(log_level)
    cluster = replace(ClientConfig.of(namesrv), route_seconds=10.0)

    def ready(running: RunningProxy) -> tuple[str, dict[str, str]]:
        address = f"{bind}:{running.port}"
        names = ";".join(cluster.namesrv_addresses)
        parts = {"proxy": address}
        metrics = ""
        if running.metrics_port is not None:
            parts["metrics"] = f"http://127.0.0.1:{running.metrics_port}/metrics"
            metrics = f", metrics on {parts['metrics']}"
        return f"gRPC server ready on {address}, in front of the cluster of {names}{metrics}", parts

    config = ProxyConfig(
        bind,
        port,
        advertised_host=advertise,
        tls=tls,
        acl_file=acl_file,
        has_broker_accounts=broker_accounts,
        metrics_port=metrics_port,
    )
    serve(grpc_server(config, cluster), ready)
