"""`downrange console`: the web console, and its users."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import ssl
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from downrange.cli.options import TlsFile
from downrange.cli.passwords import new_password
from downrange.settings import ConfigError

if TYPE_CHECKING:
    from downrange.console.config import ConsoleConfig
    from downrange.transport.tls import ServerTls

READY = "console ready on "

app = typer.Typer(
    help="Run the web console, or add its users.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def run(
    context: typer.Context,
    namesrv: Annotated[
        list[str] | None,
        typer.Option(
            "--namesrv",
            "-n",
            help="Name servers of a cluster, `prod=ns1:9876;ns2:9876`; give it once for each cluster.",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes a free one.")] = 8082,
    bind: Annotated[str, typer.Option("--bind", "-b", help="Address to listen on.")] = "127.0.0.1",
    auth: Annotated[str, typer.Option("--auth", help="Login: none, file, acl or header.")] = "none",
    users: Annotated[Path | None, typer.Option("--users", help="File of users for --auth file.")] = None,
    proxy: Annotated[
        list[str] | None, typer.Option("--proxy", help="Address of the proxy whose headers --auth header trusts.")
    ] = None,
    user_header: Annotated[str, typer.Option(help="Header with the name of the user.")] = "X-Forwarded-User",
    role_header: Annotated[str, typer.Option(help="Header with viewer, operator or admin.")] = "X-Forwarded-Role",
    public_url: Annotated[str | None, typer.Option(help="Address under which browsers reach the console.")] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer nothing that changes a cluster.")] = False,
    history: Annotated[Path | None, typer.Option(help="SQLite file for charts and jobs. [in memory]")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics", help="Metrics of a broker, `prod=http://broker:5557/metrics`; give it once for each broker."
        ),
    ] = None,
    audit_log: Annotated[Path | None, typer.Option(help="File of the audit log. [beside --history]")] = None,
    mask: Annotated[str | None, typer.Option(help="Names of fields whose values viewers do not see.")] = None,
    no_bodies: Annotated[bool, typer.Option("--no-bodies", help="Do not show bodies of messages.")] = False,
    no_export: Annotated[bool, typer.Option("--no-export", help="Do not offer downloads of messages.")] = False,
    tls_config: TlsFile = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines can reach, without a login or TLS.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="DEBUG, INFO, WARNING or ERROR.")] = "WARNING",
) -> None:
    """Run the web console until it is stopped with SIGTERM or Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    check_extra()
    from downrange.cli.process import check_bind, serve, start_logging
    from downrange.console.config import AccessConfig, ConsoleConfig, LoginKind, parse_clusters, parse_metrics

    if auth not in list(LoginKind):
        raise ConfigError(f"--auth {auth}: expected {', '.join(LoginKind)}")
    access = AccessConfig(
        login=LoginKind(auth),
        users_file=users,
        proxy_addresses=tuple(proxy or ()),
        user_header=user_header,
        role_header=role_header,
        public_url=public_url,
        read_only=read_only,
        mask=mask,
        show_bodies=not no_bodies,
        allow_export=not no_export,
    )
    is_https = tls_config is not None or (public_url or "").startswith("https:")
    protections = {"--auth": access.login is not LoginKind.NONE, "--tls-config or --public-url https://…": is_https}
    check_bind(bind, protections, insecure=insecure)
    clusters = parse_clusters(namesrv or [])
    told = parse_metrics(metrics or [], clusters)
    config = ConsoleConfig(clusters, bind, port, access, history, audit_log, metrics=told)
    start_logging(log_level)

    def ready(address: str) -> tuple[str, dict[str, str]]:
        if open_browser:
            webbrowser.open(address)
        return f"{READY}{address}", {"console": urlsplit(address).netloc}

    serve(_running(config, _tls(tls_config), with_parent), ready)


@asynccontextmanager
async def _running(config: ConsoleConfig, tls: ServerTls | None, with_parent: bool) -> AsyncIterator[str]:
    gc.disable()  # what imports make is no garbage, and looking through it again and again takes long
    try:
        from downrange.console.app import console

        if with_parent:
            asyncio.get_running_loop().add_reader(0, _end_with_parent)
        async with console(config, None if tls is None else _context(tls)) as (_, address):
            gc.freeze()
            gc.enable()
            yield address
    finally:
        gc.enable()


def _end_with_parent() -> None:
    """Standard input can be read: its other end was closed, because the parent has ended."""
    if not os.read(0, 64):
        asyncio.get_running_loop().remove_reader(0)
        os.kill(os.getpid(), signal.SIGTERM)


def _tls(tls_config: Path | None) -> ServerTls | None:
    if tls_config is None:
        return None
    from downrange.transport.tls import ServerTls
    from downrange.transport.tls_config import TlsConfig, TlsMode

    return ServerTls(TlsConfig(config_file=tls_config), TlsMode.ENFORCING)


def _context(tls: ServerTls) -> ssl.SSLContext:
    """The context to listen with; each connection gets the one of the files as they are then."""
    context = tls.context()

    def newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    context.sni_callback = newest
    return context


def check_extra() -> None:
    try:
        import jinja2
        import starlette
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the package {error.name} is missing: pip install 'downrange[console]'") from None
    del jinja2, starlette


@app.command("add-user")
def add_user(
    name: Annotated[str, typer.Argument(help="Name of the user.")],
    users: Annotated[Path, typer.Option("--users", help="File of users; created if missing.")],
    role: Annotated[str, typer.Option("--role", help="viewer, operator or admin.")] = "viewer",
    password_file: Annotated[Path | None, typer.Option(help="File with the password. [asked for]")] = None,
) -> None:
    """Add a user to the file of --auth file, or change the role and password of a user."""
    from downrange.console.users_file import add_user as add
    from downrange.console.users_file import role_of

    password = new_password(None, password_file)
    is_new = add(users, name, role_of(role), password)
    typer.echo(f"user {name} {'added' if is_new else 'changed'} in {users}")
