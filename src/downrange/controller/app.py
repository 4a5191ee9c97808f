"""Builds a controller from its parts and runs it from start to stop."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from downrange.auth.audit import AuditLog
from downrange.auth.configured_users import configured_inner_user
from downrange.auth.gate import Gate
from downrange.auth.server_access import (
    ACCOUNTS,
    ServerAccess,
    broker_addresses,
    check_accounts,
    found_beside,
    is_limited,
    server_access,
)
from downrange.clock import BootClock, Clock
from downrange.compiled import VARIANT
from downrange.controller.access import REQUESTS
from downrange.controller.broker_links import BrokerLinks
from downrange.controller.config import REMOTELY_CHANGEABLE, WITHOUT_EFFECT, ControllerConfig
from downrange.controller.coordination import Coordination
from downrange.controller.etcd import EtcdAccess, EtcdClient
from downrange.controller.handlers import ControllerHandlers, Parts
from downrange.controller.http_json import Endpoint
from downrange.controller.leader_link import LeaderLink
from downrange.controller.leadership import Leadership, Peer, Term
from downrange.controller.liveness import Liveness, ReplicaKey
from downrange.controller.metrics import ControllerPages
from downrange.controller.overseer import Overseer
from downrange.controller.sets import BrokerSets, Keys
from downrange.protocol.signing import Signer
from downrange.settings import ConfigError, Property, check_known, configure, read_properties, readable_secrets
from downrange.transport.connection import Connection
from downrange.transport.limits import Limits
from downrange.transport.running_services import running_services
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands
from downrange.transport.signed_pool import SignedPool
from downrange.transport.tls import outgoing_tls, server_tls
from downrange.transport.tls_config import TlsConfig, TlsMode, resolved

log = logging.getLogger(__name__)

# A broker that hears nothing may still send heartbeats for a while: its machine acknowledges no answer then.
UNACKNOWLEDGED_SECONDS: Final = 1.0


def load_config(path: Path | None, overrides: dict[str, Property]) -> tuple[ControllerConfig, list[str]]:
    """The configuration from a file, a command line and changes made while running; and warnings about its keys."""
    properties = {**(read_properties(path) if path else {}), **overrides}
    warnings = check_known(properties, [ControllerConfig, TlsConfig], WITHOUT_EFFECT)
    config = configure(ControllerConfig, properties)
    if kept := REMOTELY_CHANGEABLE.kept(config.config_store_path):
        config = configure(ControllerConfig, {**properties, **kept})
    config = replace(config, acl_file=found_beside(path, config), tls=configure(TlsConfig, properties))
    broker_addresses(config)  # wrong values are found before anything starts
    etcd_access(config)
    check_accounts(config)
    return config, warnings + readable_secrets(properties, [ControllerConfig, TlsConfig])


def protections(config: ControllerConfig) -> dict[str, bool]:
    """The settings that protect a controller which other machines can reach, and whether each is on."""
    return {
        ACCOUNTS: is_limited(config),
        "tls.server.mode=enforcing": resolved(config.tls).mode is TlsMode.ENFORCING,
    }


def etcd_access(config: ControllerConfig) -> EtcdAccess:
    """How etcd is reached. Raises ConfigError, without any secret in it."""
    endpoints = tuple(Endpoint.parse(part) for part in config.etcd_endpoints.split(";") if part.strip())
    if not endpoints:
        raise ConfigError("etcdEndpoints is empty: expected addresses such as http://127.0.0.1:2379")
    if not config.etcd_prefix.startswith("/") or config.etcd_prefix.endswith("/"):
        raise ConfigError(f"etcdPrefix={config.etcd_prefix}: expected a path such as /downrange/controller")
    context = None
    if any(endpoint.is_tls for endpoint in endpoints):
        try:
            context = ssl.create_default_context(cafile=config.etcd_trust_cert_path)
            if config.etcd_cert_path is not None:
                context.load_cert_chain(config.etcd_cert_path, config.etcd_key_path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificates for etcd cannot be read: {error}") from None
    return EtcdAccess(endpoints, config.etcd_timeout_mills / 1000, context, config.etcd_user, config.etcd_password)


@dataclass(frozen=True, slots=True)
class RunningController:
    """A controller that runs."""

    server: Server
    parts: Parts
    metrics_port: int | None

    @property
    def address(self) -> str:
        """Where others reach it."""
        return self.parts.leadership.me.address


@asynccontextmanager
async def controller(
    config: ControllerConfig, store: Coordination | None = None, clock: Clock | None = None
) -> AsyncIterator[RunningController]:
    """A running controller; it stops when the block ends. `store` is etcd as the configuration says unless given."""
    clock = clock or BootClock()
    access = server_access(config, REQUESTS, clock)
    async with AsyncExitStack() as stack:
        server = Server(serve_commands(lambda command, connection: None), config.bind_address, config.listen_port)
        await server.bind()
        if store is None:
            store = EtcdClient(etcd_access(config))
            stack.push_async_callback(store.close)
        parts = await _parts(config, store, clock, server, stack)
        handlers = ControllerHandlers(parts, config, clock)
        stack.push_async_callback(handlers.stop)
        stack.push_async_callback(parts.overseer.stop)
        gate = _connect(server, handlers, access, config, stack, clock)
        await stack.enter_async_context(server)
        refused = None if gate is None else gate.figures
        pages = ControllerPages(parts, config.controller_dleger_group, clock, refused).server(config.metrics_port)
        if config.metrics_port >= 0:
            await pages.start()
            stack.push_async_callback(pages.stop)
        services = running_services(
            leadership=parts.leadership.run(),
            overseer=parts.overseer.run(lambda: handlers.config.scan_not_active_broker_interval / 1000),
            **(access.services() if access is not None else {}),
        )
        await stack.enter_async_context(services)
        log.info("controller started address=%s variant=%s", parts.leadership.me.address, VARIANT)
        yield RunningController(server, parts, pages.port if config.metrics_port >= 0 else None)


async def _parts(
    config: ControllerConfig, store: Coordination, clock: Clock, server: Server, stack: AsyncExitStack
) -> Parts:
    inner = configured_inner_user(config.inner_client_authentication_credentials)
    signer = None if inner is None else Signer(inner.username, inner.password)
    pool = SignedPool(signer, outgoing_tls(config.tls), connect_timeout=1.0)
    stack.push_async_callback(pool.close)
    keys = Keys(config.etcd_prefix)
    sets, liveness, links = BrokerSets(store, keys), Liveness(), BrokerLinks(pool)
    overseer = Overseer(sets, liveness, links, clock)
    overseer.notifies = config.notify_broker_role_changed

    async def take_office(term: Term) -> None:
        await sets.load()
        now = clock.monotonic()
        replicas = {ReplicaKey(one.broker_name, id_): at for one in sets for id_, at in one.replicas.items()}
        liveness.take_office(replicas, now)
        for one in sets:  # masters may have leases of the leader before
            liveness.lease(one.broker_name, now + config.lease_millis / 1000)
        for key, replica in replicas.items():
            overseer.look_at_settings(key, replica.address)

    link = LeaderLink()
    stack.callback(link.close)
    leadership = Leadership(store, keys.leader, me(config, server.port), clock, take_office, link.gone)
    sets.serve(leadership)
    return Parts(leadership, sets, liveness, overseer)


def me(config: ControllerConfig, port: int) -> Peer:
    """This controller as others know it."""
    own = config.controller_dleger_self_id
    listed = dict(part.split("-", 1) for part in config.controller_dleger_peers.split(";") if "-" in part)
    address = config.advertised_address or listed.get(own) or f"{config.bind_address}:{port}"
    return Peer(own or address, address)


def _connect(
    server: Server,
    handlers: ControllerHandlers,
    access: ServerAccess | None,
    config: ControllerConfig,
    stack: AsyncExitStack,
    clock: Clock,
) -> Gate | None:
    """Let a server answer with these handlers, behind the gate; without access control there is none."""
    gate = None
    if access is not None:
        audit = AuditLog(config.audit_log_file, config.audit_log_file_size)
        stack.callback(audit.close)
        gate = Gate(access.guard(handlers.codes), audit, clock, config.failed_login_wait_mills / 1000)

    def closed(connection: Connection) -> None:
        if gate is not None:
            gate.forget(connection)
        handlers.closed(connection)

    server.limits = replace(
        Limits(),
        idle_seconds=float(config.server_channel_max_idle_time_seconds),
        unacknowledged_seconds=UNACKNOWLEDGED_SECONDS,
    )
    server.tls = server_tls(config.tls)
    server.on_close = closed
    server.serve = serve_commands(handlers, gate.admitted if gate is not None else None)
    return gate
