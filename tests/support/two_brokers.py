"""A name server and two brokers of one cluster in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.clock import Clock
from downrange.namesrv.app import name_server
from downrange.namesrv.config import NamesrvConfig
from tests.support.broker_client import store_config


class TwoBrokers(NamedTuple):
    namesrv: str
    a: RunningBroker
    b: RunningBroker


@asynccontextmanager
async def two_brokers(
    root: Path, *, broker_options: Mapping[str, object] | None = None, clock: Clock | None = None
) -> AsyncIterator[TwoBrokers]:
    names = NamesrvConfig(listen_port=0, kv_config_path=root / "kv.json", config_store_path=root / "ns.properties")
    async with name_server(names) as namesrv, AsyncExitStack() as stack:
        address = f"127.0.0.1:{namesrv.port}"
        running = []
        for name in ("broker-a", "broker-b"):
            config = replace(
                BrokerConfig(namesrv_addr=address, broker_name=name, listen_port=0, metrics_port=-1),
                **(broker_options or {}),  # type: ignore[arg-type]
            )
            running.append(await stack.enter_async_context(broker(config, store_config(root / name), clock)))
        yield TwoBrokers(address, *running)
