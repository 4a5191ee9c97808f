"""Builds a name server from its parts and runs it from start to stop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from downrange.clock import Clock, SystemClock
from downrange.compiled import VARIANT
from downrange.namesrv.config import REMOTELY_CHANGEABLE, WITHOUT_EFFECT, NamesrvConfig
from downrange.namesrv.handlers import NamesrvHandlers
from downrange.namesrv.kv_config import KVConfig
from downrange.namesrv.route_table import RouteTable
from downrange.settings import Property, check_known, configure, read_properties
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.running_services import running_services
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from downrange.transport.tls import server_tls
from downrange.transport.tls_config import TlsConfig

log = logging.getLogger(__name__)


def load_config(path: Path | None, overrides: dict[str, Property]) -> tuple[NamesrvConfig, list[str]]:
    """The configuration from a file, a command line and changes made while running; and warnings about its keys."""
    properties = {**(read_properties(path) if path else {}), **overrides}
    warnings = check_known(properties, [NamesrvConfig, TlsConfig], WITHOUT_EFFECT)
    config = configure(NamesrvConfig, properties)
    if config.config_store_path.exists():
        changed = read_properties(config.config_store_path)
        kept = {key: value for key, value in changed.items() if key in REMOTELY_CHANGEABLE}
        config = configure(NamesrvConfig, {**properties, **kept})
    return replace(config, tls=configure(TlsConfig, properties)), warnings


@asynccontextmanager
async def name_server(config: NamesrvConfig, clock: Clock | None = None) -> AsyncIterator[Server]:
    """A running name server; it stops when the block ends."""
    clock = clock or SystemClock()
    routes = RouteTable(drop_topics_left_out=config.delete_topic_with_broker_registration)
    handlers = NamesrvHandlers(routes, KVConfig(config.kv_config_path), config, clock)

    def closed(connection: Connection) -> None:
        for address in routes.drop_connection(connection):
            log.info("broker gone address=%s reason=connection closed", address)

    limits = replace(Limits(), idle_seconds=float(config.server_channel_max_idle_time_seconds))
    serve = serve_commands(handlers)
    tls = server_tls(config.tls)
    server = Server(serve, config.bind_address, config.listen_port, limits=limits, tls=tls, on_close=closed)
    pause = config.scan_not_active_broker_interval / 1000
    async with server, running_services(expiry=expire_brokers(routes, clock, pause)):
        log.info("name server started port=%d variant=%s", server.port, VARIANT)
        yield server


async def expire_brokers(routes: RouteTable, clock: Clock, pause_seconds: float) -> None:
    """Forget brokers that fell silent and close their connections."""
    await clock.sleep(min(5.0, pause_seconds))
    while True:
        for connection in routes.expire(clock.now()):
            assert isinstance(connection, Connection)
            log.warning("broker expired peer=%s", connection.peer)
            connection.abort()
        await clock.sleep(pause_seconds)
