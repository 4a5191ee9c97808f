"""Composition root of the gRPC server: every part is built here once, started here, and stopped here in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from downrange.auth.access_control import AccessControl
from downrange.auth.audit import AuditLog
from downrange.auth.gate import Gate
from downrange.auth.plain_acl_files import PlainAclFiles
from downrange.client.config import ClientConfig
from downrange.client.session import Session
from downrange.clock import Clock, SystemClock
from downrange.proxy.access import CallGuard
from downrange.proxy.broker_accounts import BrokerAccounts
from downrange.proxy.broker_questions import BrokerQuestions
from downrange.proxy.call_figures import CallFigures
from downrange.proxy.clients import Clients
from downrange.proxy.config import ProxyConfig
from downrange.proxy.http2.server import Http2Server
from downrange.proxy.metrics import metrics_page
from downrange.proxy.receiving import Receiving
from downrange.proxy.remoting_backend import RemotingBackend
from downrange.proxy.renewal import Renewal
from downrange.proxy.routing import endpoints_of
from downrange.proxy.sending import Sending
from downrange.proxy.service import Service
from downrange.proxy.tls import grpc_tls
from downrange.transport.own_address import EVERY_ADDRESS, own_address
from downrange.transport.running_services import running_services

log = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 2.0
_RELEASED_AFTER_SECONDS: Final = 15.0
"""The messages of a push consumer without a stream and without heartbeats are given to others after this time."""


@dataclass(frozen=True, slots=True)
class RunningProxy:
    """A gRPC server that serves."""

    server: Http2Server
    clients: Clients
    renewal: Renewal
    figures: CallFigures
    metrics_port: int | None

    @property
    def port(self) -> int:
        return self.server.port


@asynccontextmanager
async def grpc_server(
    config: ProxyConfig,
    cluster: ClientConfig,
    clock: Clock | None = None,
    *,
    access: AccessControl | None = None,
    audit: AuditLog | None = None,
    gate: Gate | None = None,
) -> AsyncIterator[RunningProxy]:
    """A running gRPC server in front of the brokers of a cluster; it stops when the block ends.

    `access`, `audit` and `gate` are those of the broker in whose process the server runs; a server that stands alone
    has those of `config`. Clients are checked here: brokers see the account of the server.
    """
    clock = clock or SystemClock()
    files = PlainAclFiles(config.acl_file, clock) if config.acl_file is not None else None
    if files is not None:
        access = files.access_control
    async with Session(cluster, clock=clock) as session:
        copied = BrokerAccounts(session, clock) if config.has_broker_accounts else None
        if copied is not None:
            access = copied.access_control
            await copied.copy()
        backend = RemotingBackend(session)
        clients = Clients(backend)
        renewal = Renewal(backend, clock)
        sending = Sending(backend, clients, clock)
        receiving = Receiving(backend, clients, renewal, clock)
        guard = CallGuard(access, audit, clock, config.failed_login_wait_seconds, gate)
        service = Service(backend, clients, renewal, sending, receiving, guard)
        BrokerQuestions(session, clients, sending.transactions)
        tls = grpc_tls(config.tls)
        server = Http2Server(service.call, config.bind_address, config.port, tls=tls, limits=config.limits)
        await server.bind()
        host = config.advertised_host or config.bind_address
        if host in EVERY_ADDRESS:
            host = own_address(cluster.namesrv_addresses)
        service.own_endpoints.CopyFrom(endpoints_of(host, server.port))
        session.start()
        service.figures.count_connections(server.connections)
        server.start()
        log.info("gRPC server ready address=%s:%d tls=%s", config.bind_address, server.port, tls is not None)
        try:
            services = {"renewal": renewal.run(), "clients": _expire(clients, renewal, clock)}
            if files is not None:
                services["plain_acl"] = files.watch()
            if copied is not None:
                services["broker_accounts"] = copied.run()
            node = f"{host}:{server.port}"
            page = metrics_page(service.figures, node, config.metrics_port)
            async with running_services(**services), page as metrics_port:
                yield RunningProxy(server, clients, renewal, service.figures, metrics_port)
        finally:
            await server.stop()
            await service.stop()
            await asyncio.gather(*(renewal.release(client_id) for client_id in renewal.clients))


async def _expire(clients: Clients, renewal: Renewal, clock: Clock) -> None:
    """Forget clients that fell silent, and give their messages to others."""
    loop = asyncio.get_running_loop()
    while True:
        await clock.sleep(_PAUSE_SECONDS)
        for client_id in renewal.clients:
            client = clients.get(client_id)
            is_gone = client is None or (not client.streams and loop.time() - client.heard > _RELEASED_AFTER_SECONDS)
            if is_gone:
                await renewal.release(client_id)
        for client in clients.silent():
            log.info("client expired id=%s", client.client_id)
            await clients.remove(client)
