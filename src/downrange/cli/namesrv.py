"""`downrange namesrv`: run a name server."""

from __future__ import annotations

from pathlib import Path

import typer

from downrange.cli.options import TlsFile, TlsMode


def run(
    port: int | None = typer.Option(None, "--port", "-p", help="Port to listen on; 0 takes a free one. [9876]"),
    bind: str | None = typer.Option(None, "--bind", "-b", help="Address to listen on. [127.0.0.1]"),
    config_file: Path | None = typer.Option(None, "--config", "-c", help="RocketMQ name server properties file."),
    data: Path | None = typer.Option(None, "--data", "-d", help="Directory for settings. [~/namesrv]"),
    tls_mode: TlsMode = None,
    tls_config: TlsFile = None,
    insecure: bool = typer.Option(False, "--insecure", help="Allow an address that other machines can reach."),
    log_level: str = typer.Option("INFO", "--log-level", help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run a name server until it is stopped with SIGTERM or Ctrl-C."""
    from downrange.cli.process import check_bind, overrides, serve, start_logging, warn
    from downrange.namesrv.app import load_config, name_server, protections
    from downrange.transport.server import Server

    config, warnings = load_config(
        config_file,
        overrides(
            listenPort=port,
            bindAddress=bind,
            kvConfigPath=data and data / "kvConfig.json",
            configStorePath=data and data / "namesrv.properties",
            **{"tls.server.mode": tls_mode, "tls.config.file": tls_config},
        ),
    )
    check_bind(config.bind_address, protections(config), insecure=insecure)
    start_logging(log_level)
    warn(warnings)

    def ready(server: Server) -> tuple[str, dict[str, str]]:
        address = f"{server.host}:{server.port}"
        return f"name server ready on {address}", {"namesrv": address}

    serve(name_server(config), ready, {config.listen_port: "--port"})
