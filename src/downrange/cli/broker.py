"""`downrange broker`, `downrange standalone`, `downrange shutdown`: run servers and stop them."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from downrange.cli import run_files
from downrange.cli.options import TlsFile, TlsMode
from downrange.cli.run_files import Noted
from downrange.settings import ConfigError, read_properties

if TYPE_CHECKING:
    from downrange.broker.config import BrokerConfig

_STARTED = time.monotonic()


def run_broker(
    namesrv: str | None = typer.Option(None, "--namesrv", "-n", help="Name servers, separated by ';'. [$NAMESRV_ADDR]"),
    config_file: Path | None = typer.Option(None, "--config", "-c", help="RocketMQ broker.conf."),
    name: str | None = typer.Option(None, "--name", help="Name of this broker. [host name]"),
    role: str | None = typer.Option(None, "--role", help="ASYNC_MASTER, SYNC_MASTER or SLAVE. [ASYNC_MASTER]"),
    broker_id: int | None = typer.Option(None, "--id", help="0 for a master, more for a slave. [0]"),
    port: int | None = typer.Option(None, "--port", "-p", help="Port to listen on; 0 takes a free one. [10911]"),
    bind: str | None = typer.Option(None, "--bind", "-b", help="Address to listen on. [127.0.0.1]"),
    advertise: str | None = typer.Option(
        None,
        "--advertise",
        help="Host or address by which clients reach this broker. [--bind, or an address that others can reach]",
    ),
    data: Path | None = typer.Option(None, "--data", "-d", help="Directory for messages. [~/store]"),
    metrics_port: int | None = typer.Option(None, "--metrics-port", help="Port of /metrics; -1 for none. [5557]"),
    grpc_port: int | None = typer.Option(
        None, "--grpc-port", min=-1, max=65535, help="Port for gRPC clients; 0 takes a free one, -1 is none. [8081]"
    ),
    tls_mode: TlsMode = None,
    tls_config: TlsFile = None,
    insecure: bool = typer.Option(False, "--insecure", help="Allow an address that other machines can reach."),
    log_level: str = typer.Option("INFO", "--log-level", help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run a broker until it is stopped with SIGTERM or Ctrl-C."""
    from downrange.broker.app import RunningBroker, broker, load_config, protections
    from downrange.cli.grpc_port import grpc_beside
    from downrange.cli.process import check_bind, listening, overrides, serve, start_logging, warn

    config, store, warnings = load_config(
        config_file,
        overrides(
            namesrvAddr=namesrv,
            brokerName=name,
            brokerRole=role,
            brokerId=broker_id,
            listenPort=port,
            bindAddress=bind,
            brokerIP1=advertise,
            storePathRootDir=data,
            metricsPort=metrics_port,
            grpcServerPort=grpc_port,
            **{"tls.server.mode": tls_mode, "tls.config.file": tls_config},
        ),
    )
    if broker_id and not config.broker_id:  # it would start with id 0, in the place of the real master
        raise ConfigError(f"--id {broker_id} is the id of a slave: add --role SLAVE; a master has id 0")
    if not config.namesrv_addresses:
        raise ConfigError("no name server: give one with -n ADDR, namesrvAddr in the file, or NAMESRV_ADDR")
    check_bind(config.bind_address, protections(config, store), insecure=insecure)
    start_logging(log_level)
    warn(warnings)

    @asynccontextmanager
    async def both() -> AsyncIterator[tuple[RunningBroker, int | None]]:
        async with broker(config, store) as running, grpc_beside(running) as port:
            yield running, port

    def ready(started: tuple[RunningBroker, int | None]) -> tuple[str, dict[str, Noted]]:
        running, port = started
        live = running.config.broker
        known = f"{running.registered_with} of {len(live.namesrv_addresses)} name servers"
        grpc = "" if port is None else f", gRPC on port {port}"
        where = listening(live.bind_address, live.address)
        text = f"broker {live.broker_name} ready on {where}, registered with {known}{grpc}"
        return text, {"broker": Noted(live.address, live.broker_name, str(store.store_path_root_dir.resolve()))}

    serve(both(), ready, port_options(config, "--port"))


def run_standalone(
    data: Path = typer.Option(Path("downrange-data"), "--data", "-d", help="Directory for messages and settings."),
    bind: str = typer.Option("127.0.0.1", "--bind", "-b", help="Address to listen on."),
    advertise: str | None = typer.Option(
        None,
        "--advertise",
        help="Host or address by which clients reach this broker. [--bind, or an address that others can reach]",
    ),
    namesrv_port: int = typer.Option(9876, "--namesrv-port", help="Port of the name server; 0 takes a free one."),
    broker_port: int = typer.Option(10911, "--broker-port", help="Port of the broker; 0 takes a free one."),
    metrics_port: int = typer.Option(5557, "--metrics-port", help="Port of /metrics and /healthz; -1 for none."),
    grpc_port: int | None = typer.Option(
        None, "--grpc-port", min=-1, max=65535, help="Port for gRPC clients; 0 takes a free one, -1 is none. [8081]"
    ),
    console: bool = typer.Option(False, "--console", help="Run the web console, too, in a process of its own."),
    console_port: int = typer.Option(8082, "--console-port", min=0, max=65535, help="Port of the web console."),
    config_file: Path | None = typer.Option(None, "--config", "-c", help="RocketMQ broker.conf for the broker."),
    tls_mode: TlsMode = None,
    tls_config: TlsFile = None,
    insecure: bool = typer.Option(False, "--insecure", help="Allow an address that other machines can reach."),
    log_level: str = typer.Option("WARNING", "--log-level", help="DEBUG, INFO, WARNING or ERROR."),
) -> None:
    """Run a name server and a broker in one process. Sending and receiving needs nothing else."""
    from downrange.auth.server_access import LentAccounts
    from downrange.broker.app import RunningBroker, broker, load_config, protections
    from downrange.cli.console_child import ConsoleWish, console_beside
    from downrange.cli.grpc_port import grpc_beside
    from downrange.cli.process import check_bind, listening, overrides, serve, start_logging, warn
    from downrange.namesrv.app import load_config as load_namesrv_config
    from downrange.namesrv.app import name_server
    from downrange.namesrv.app import protections as namesrv_protections
    from downrange.transport.tls_config import is_tls_key, resolved

    directory = data.resolve()
    wants_console = ConsoleWish(console_port, bind, insecure) if console else None
    tls = overrides(**{"tls.server.mode": tls_mode, "tls.config.file": tls_config})
    given = read_properties(config_file) if config_file else {}
    settings = tls | overrides(
        namesrvAddr="",  # known when the name server listens
        brokerName="broker-a" if config_file is None else None,
        listenPort=broker_port,
        bindAddress=bind,
        brokerIP1=advertise,
        storePathRootDir=directory / "store",
        metricsPort=metrics_port,
        grpcServerPort=grpc_port,
    )
    config, store, warnings = load_config(config_file, settings)
    is_limited = config.acl_enable or config.authentication_enabled
    lent = LentAccounts()
    namesrv_config, _ = load_namesrv_config(
        None,
        {key: value for key, value in given.items() if is_tls_key(key)}  # the broker's are for both
        | tls
        | overrides(
            listenPort=namesrv_port,
            bindAddress=bind,
            kvConfigPath=directory / "namesrv" / "kvConfig.json",
            configStorePath=directory / "namesrv" / "namesrv.properties",
            # The accounts of the broker are those of the name server, and the broker beside it needs none.
            aclEnable=config.acl_enable,
            aclFile=config.acl_file,
            authenticationEnabled=config.authentication_enabled,
            allowedBrokerAddresses=_own_addresses(bind) if is_limited else None,
        ),
        lent,
    )
    check_bind(bind, protections(config, store) | namesrv_protections(namesrv_config), insecure=insecure)
    start_logging(log_level)
    warn(warnings)

    @asynccontextmanager
    async def both() -> AsyncIterator[tuple[str, RunningBroker, int | None, str | None]]:
        async with name_server(namesrv_config, lent=lent) as names:
            address = f"{bind}:{names.port}"
            async with broker(replace(config, namesrv_addr=address), store) as running:
                lent.lender = running.inner
                async with (
                    grpc_beside(running) as port,
                    console_beside(wants_console, running, address, directory) as page,
                ):
                    yield address, running, port, page

    def ready(started: tuple[str, RunningBroker, int | None, str | None]) -> tuple[str, dict[str, Noted]]:
        address, running, port, page = started
        live = running.config.broker
        has_file = resolved(live.tls).is_enabled and live.tls.config_file is not None
        client = f" --tls-config {live.tls.config_file}" if has_file else ""
        metrics = f"http://127.0.0.1:{running.metrics_port}/metrics" if running.metrics_port else "off"
        text = (
            f"downrange is ready after {time.monotonic() - _STARTED:.2f} s\n"
            f"  name server  {address}\n"
            f"  broker       {listening(bind, live.address)} ({live.broker_name})\n"
            f"  gRPC         {'off' if port is None else f'{bind}:{port}'}\n"
            f"  data         {directory}\n"
            f"  metrics      {metrics}\n"
            f"  console      {page or 'off; --console starts it'}\n"
            "Try in another terminal:\n"
            f"  downrange{client} topic list -n {address}\n"
            f"  downrange{client} message send hello 'Hello, world' -n {address}\n"
            f"Stop with Ctrl-C or: downrange shutdown broker {live.address.rpartition(':')[2]}"
        )
        return text, {
            "namesrv": Noted(address, "", str(directory)),
            "broker": Noted(live.address, live.broker_name, str(directory)),
        }

    serve(both(), ready, {**port_options(config, "--broker-port"), namesrv_port: "--namesrv-port"})


def port_options(config: BrokerConfig, main: str) -> dict[int, str]:
    """The options that give the ports of a broker. With its main port it takes two more."""
    return {
        config.listen_port - 2: f"it is the VIP port, two below that of the broker: {main}",
        config.listen_port + 1: f"it is the port for slaves, next to that of the broker: {main}",
        config.listen_port: main,
        config.metrics_port: "--metrics-port",
    }


def _own_addresses(bind: str) -> str:
    """The addresses from which a broker reaches a name server that listens on this address of its machine."""
    try:
        return f"127.0.0.1;{ipaddress.ip_address(bind)}"
    except ValueError:  # a host name
        return "127.0.0.1"


def run_shutdown(
    role: str = typer.Argument(..., metavar="broker|namesrv", help="Kind of server to stop."),
    which: str | None = typer.Argument(
        None, metavar="[PORT|HOST:PORT|NAME|DIR]", help="Only the server with this port, address, name or directory."
    ),
    seconds: float = typer.Option(30.0, "--wait", help="Seconds to wait for each server.", min=0),
) -> None:
    """Stop the brokers or name servers that you started on this machine, as mqshutdown does."""
    if role not in ("broker", "namesrv"):
        raise ConfigError(f"there is no role {role}: expected broker or namesrv")
    servers = [one for one in run_files.running(role) if which is None or one.is_called(which)]
    if not servers:
        called = "" if which is None else f" called {which}"
        typer.echo(f"downrange: no {role}{called} started by you is running here", err=True)
        raise typer.Exit(1)
    for server in servers:
        if run_files.stop(server, seconds):
            typer.echo(f"{role} on {server.address} (pid {server.pid}) stopped")
        else:
            typer.echo(
                f"downrange: {role} on {server.address} (pid {server.pid}) still runs after {seconds:g} s", err=True
            )
            raise typer.Exit(1)
