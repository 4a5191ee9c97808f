"""`downrange tls init`: a small certificate authority, and certificates to try TLS out with."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from downrange.cli.options import UsageError, command_family
from downrange.settings import format_properties

app = command_family("Certificates for TLS.")

_FILES = ("ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key")


@app.callback()
def _family() -> None:
    """Certificates for TLS."""


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Directory for the files; created if missing.")] = Path("tls"),
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            help="A host name or address by which clients reach the servers; may be repeated. "
            "[localhost, 127.0.0.1, ::1 and this host's name]",
        ),
    ] = None,
    client: Annotated[str, typer.Option("--client", help="Name in the certificate of clients.")] = "client",
    days: Annotated[int, typer.Option("--days", help="Days for which the certificates are valid.", min=1)] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Make a new certificate authority, a server certificate, a client certificate, and the settings that use them."""
    from downrange.transport.certificates import make_authority, make_client, make_server

    home = directory.absolute()
    there = [name for name in (*_FILES, *_settings(home)) if (home / name).exists()]
    if there and not force:
        raise UsageError(f"{home / there[0]} exists: name another directory, or replace all files with --force")
    authority = make_authority(days=days)
    server = make_server(authority, dict.fromkeys(names or _default_names()), days)
    home.mkdir(parents=True, exist_ok=True)
    authority.write(home / "ca.pem", home / "ca.key")
    server.write(home / "server.pem", home / "server.key")
    make_client(authority, client, days).write(home / "client.pem", home / "client.key")
    for name, text in _settings(home).items():
        (home / name).write_text(text)
    typer.echo(
        f"{home}: an authority, a server and a client, good for {days} days\n"
        "Start servers that take TLS only, from clients with a certificate of this authority:\n"
        f"  downrange standalone --tls-mode enforcing --tls-config {home / 'server.properties'}\n"
        "or put these two lines into broker.conf and into the file of the name server:\n"
        "  tls.server.mode=enforcing\n"
        f"  tls.config.file={home / 'server.properties'}\n"
        "Connect:\n"
        f"  downrange --tls-config {home / 'client.properties'} topic list -n localhost:9876\n"
        f"or, for every client of a shell: export ROCKETMQ_TLS_CONFIG_FILE={home / 'client.properties'}\n"
        "Run the console over HTTPS:\n"
        f"  downrange --tls-config {home / 'client.properties'} console --tls-config {home / 'console.properties'}\n"
        f"Keep {home / 'ca.key'} to yourself: it makes clients and servers that all of these trust."
    )


def _default_names() -> tuple[str, ...]:
    return "localhost", "127.0.0.1", "::1", socket.gethostname()


def _settings(home: Path) -> dict[str, str]:
    """The properties files, by name."""
    console = {"tls.server.certPath": home / "server.pem", "tls.server.keyPath": home / "server.key"}
    server = {**console, "tls.server.need.client.auth": "require", "tls.server.trustCertPath": home / "ca.pem"}
    own = "# For the connections that the server makes itself:\n"
    return {
        "server.properties": _lines(server) + own + _lines(_as_client(home, "server")),
        "client.properties": _lines(_as_client(home, "client")),
        "console.properties": "# Browsers have no certificate to show.\n" + _lines(console),
    }


def _as_client(home: Path, name: str) -> dict[str, Path]:
    return {
        "tls.client.trustCertPath": home / "ca.pem",
        "tls.client.certPath": home / f"{name}.pem",
        "tls.client.keyPath": home / f"{name}.key",
    }


def _lines(settings: Mapping[str, object]) -> str:
    return format_properties({key: str(value) for key, value in settings.items()})
