"""A name server, a broker and a gRPC port in this process, for tests that look at them closely."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from downrange.auth.access_control import AccessControl
from downrange.broker.app import RunningBroker, broker, load_config
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig
from downrange.model.topics import MESSAGE_TYPE, SubscriptionGroupConfig, TopicConfig
from downrange.namesrv.app import load_config as load_namesrv_config
from downrange.namesrv.app import name_server
from downrange.proxy.app import RunningProxy, grpc_server
from downrange.proxy.config import ProxyConfig
from downrange.proxy.http2.limits import Http2Limits
from downrange.settings import Property

SETTINGS: Mapping[str, object] = {
    "brokerName": "broker-a",
    "bindAddress": "127.0.0.1",
    "listenPort": 0,
    "metricsPort": -1,
    "mappedFileSizeCommitLog": 64 << 20,
    "maxMessageSize": 6 << 20,
    "waitTimeMillsInSendQueue": 5000,
    "diskSpaceWarningLevelRatio": 100,
}


@dataclass(frozen=True)
class GrpcCluster:
    namesrv: str
    broker: RunningBroker
    proxy: RunningProxy

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.proxy.port}"

    async def create(
        self, topics: Mapping[str, str], groups: Sequence[SubscriptionGroupConfig] = (), queues: int = 2
    ) -> None:
        """Create topics, by name with their type, and groups."""
        key, secret = self.broker.own_account or (None, None)
        async with Admin(ClientConfig((self.namesrv,), access_key=key, secret_key=secret)) as admin:
            for name, kind in topics.items():
                config = TopicConfig(name, queues, queues, attributes={MESSAGE_TYPE: kind})
                (await admin.topics.create(config)).raise_if_none()
            for group in groups:
                (await admin.groups.create(group)).raise_if_none()


@asynccontextmanager
async def grpc_cluster(
    directory: Path,
    settings: Mapping[str, object] | None = None,
    *,
    access: AccessControl | None = None,
    limits: Http2Limits | None = None,
) -> AsyncIterator[GrpcCluster]:
    def properties(values: Mapping[str, object]) -> dict[str, Property]:
        return {key: Property(str(value)) for key, value in values.items()}

    names, _ = load_namesrv_config(None, properties({"listenPort": 0, "bindAddress": "127.0.0.1"}))
    async with name_server(names) as namesrv:
        address = f"127.0.0.1:{namesrv.port}"
        wanted = {**SETTINGS, "namesrvAddr": address, "storePathRootDir": directory / "store", **(settings or {})}
        config, store, _ = load_config(None, properties(wanted))
        async with broker(config, store, access=access) as running:
            key, secret = running.own_account or (None, None)
            cluster = ClientConfig((address,), access_key=key, secret_key=secret, route_seconds=1.0)
            wait = config.failed_login_wait_mills / 1000
            proxy = ProxyConfig(port=0, failed_login_wait_seconds=wait, limits=limits or Http2Limits())
            async with grpc_server(proxy, cluster, access=running.access.control, audit=running.audit) as server:
                yield GrpcCluster(address, running, server)
