"""Builds a name server from its parts and runs it from start to stop."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

from downrange.auth.audit import AuditLog
from downrange.auth.gate import Gate
from downrange.auth.server_access import (
    ACCOUNTS,
    LentAccounts,
    broker_addresses,
    check_accounts,
    found_beside,
    is_limited,
    server_access,
)
from downrange.clock import Clock, SystemClock
from downrange.compiled import VARIANT
from downrange.namesrv.access import REQUESTS
from downrange.namesrv.config import REMOTELY_CHANGEABLE, WITHOUT_EFFECT, NamesrvConfig
from downrange.namesrv.handlers import NamesrvHandlers
from downrange.namesrv.kv_config import KVConfig
from downrange.namesrv.route_table import RouteTable
from downrange.settings import Property, check_known, configure, read_properties, readable_secrets
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.running_services import running_services
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from downrange.transport.tls import server_tls
from downrange.transport.tls_config import TlsConfig, TlsMode, resolved

log = logging.getLogger(__name__)


def load_config(
    path: Path | None, overrides: dict[str, Property], lent: LentAccounts | None = None
) -> tuple[NamesrvConfig, list[str]]:
    """The configuration from a file, a command line and changes made while running; and warnings about its keys.

    `lent` are the accounts of a broker in this process.
    """
    properties = {**(read_properties(path) if path else {}), **overrides}
    warnings = check_known(properties, [NamesrvConfig, TlsConfig], WITHOUT_EFFECT)
    config = configure(NamesrvConfig, properties)
    if kept := REMOTELY_CHANGEABLE.kept(config.config_store_path):
        config = configure(NamesrvConfig, {**properties, **kept})
    config = replace(config, acl_file=found_beside(path, config))
    broker_addresses(config)  # wrong values are found before anything starts
    check_accounts(config, lent)
    warnings += readable_secrets(properties, [NamesrvConfig, TlsConfig])
    return replace(config, tls=configure(TlsConfig, properties)), warnings


def protections(config: NamesrvConfig) -> dict[str, bool]:
    """The settings that protect a name server which other machines can reach, and whether each is on."""
    return {
        ACCOUNTS: is_limited(config),
        "tls.server.mode=enforcing": resolved(config.tls).mode is TlsMode.ENFORCING,
    }


@asynccontextmanager
async def name_server(
    config: NamesrvConfig, clock: Clock | None = None, lent: LentAccounts | None = None
) -> AsyncIterator[Server]:
    """A running name server; it stops when the block ends. `lent` are the accounts of a broker in this process."""
    clock = clock or SystemClock()
    routes = RouteTable(drop_topics_left_out=config.delete_topic_with_broker_registration)
    handlers = NamesrvHandlers(routes, KVConfig(config.kv_config_path), config, clock)
    access = server_access(config, REQUESTS, clock, lent)
    audit = AuditLog(config.audit_log_file, config.audit_log_file_size)
    gate = None
    if access is not None:
        gate = Gate(access.guard(handlers.codes), audit, clock, config.failed_login_wait_mills / 1000)

    def closed(connection: Connection) -> None:
        if gate is not None:
            gate.forget(connection)
        for address in routes.drop_connection(connection):
            log.info("broker gone address=%s reason=connection closed", address)

    limits = replace(Limits(), idle_seconds=float(config.server_channel_max_idle_time_seconds))
    serve = serve_commands(handlers, gate.admitted if gate is not None else None)
    tls = server_tls(config.tls)
    server = Server(serve, config.bind_address, config.listen_port, limits=limits, tls=tls, on_close=closed)
    with closing(audit):
        async with (
            server,
            running_services(
                expiry=expire_brokers(routes, clock, config.scan_not_active_broker_interval / 1000),
                **(access.services() if access is not None else {}),
            ),
        ):
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
