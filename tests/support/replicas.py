"""A master and its slaves in this process, and what tests ask about their logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.model.message import PhysicalOffset
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.transport.tls_config import NO_TLS, TlsConfig
from tests.support.broker_client import store_config


@asynccontextmanager
async def names(root: Path, tls: TlsConfig = NO_TLS) -> AsyncIterator[str]:
    """A name server, by its address."""
    config = NamesrvConfig(
        listen_port=0, kv_config_path=root / "kv.json", config_store_path=root / "ns.properties", tls=tls
    )
    async with name_server(config) as running:
        yield f"127.0.0.1:{running.port}"


@asynccontextmanager
async def replica(
    root: Path,
    namesrv: str | None,
    role: BrokerRole,
    *,
    broker_id: int | None = None,
    listen_port: int = 0,
    store: Mapping[str, object] = {},
    settings: Mapping[str, object] = {},
) -> AsyncIterator[RunningBroker]:
    """One broker of the name broker-a."""
    number = broker_id if broker_id is not None else int(role is BrokerRole.SLAVE)
    config = BrokerConfig(
        namesrv_addr=namesrv,
        broker_name="broker-a",
        broker_id=number,
        listen_port=listen_port,
        metrics_port=-1,
        **settings,  # type: ignore[arg-type]
    )
    stored = store_config(root / f"store-{number}", broker_role=role, **store)
    async with broker(config, stored) as running:
        yield running


@asynccontextmanager
async def pair(
    root: Path, role: BrokerRole = BrokerRole.ASYNC_MASTER
) -> AsyncIterator[tuple[RunningBroker, RunningBroker]]:
    """A master and its slave, which follows already."""
    async with (
        names(root) as namesrv,
        replica(root, namesrv, role) as master,
        replica(root, namesrv, BrokerRole.SLAVE) as slave,
    ):
        await until(lambda: len(master.replication.states()) == 1)
        yield master, slave


async def until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that another task or process does."""
    async with asyncio.timeout(seconds):
        while not is_so():
            await asyncio.sleep(0.01)


async def caught_up(master: RunningBroker, slave: RunningBroker, seconds: float = 20) -> None:
    await until(lambda: slave.store.max_offset == master.store.max_offset, seconds)


def log_bytes(store: MessageStore, start: int | None = None) -> bytes:
    """Everything readable, from where the log begins unless told otherwise."""
    offset = max(0, store.min_offset) if start is None else start
    parts = []
    while offset < store.max_offset:
        part = store.commit_log.readable_from(PhysicalOffset(offset), 1 << 20)
        assert part is not None
        parts.append(bytes(part))
        offset += len(part)
    return b"".join(parts)
