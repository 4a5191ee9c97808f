"""Brokers under a controller in this process; the state of the controller is in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from downrange.broker.app import RunningBroker, broker
from downrange.broker.config import BrokerConfig
from downrange.broker.replication.auto_switch import AutoSwitchReplication, HaRole
from downrange.clock import BootClock, Clock
from downrange.controller.app import controller
from downrange.controller.config import ControllerConfig
from downrange.controller.memory_store import MemoryStore
from downrange.protocol.bodies.controller import ElectMasterRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.transport.pool import connect
from downrange.transport.tls_config import NO_TLS, TlsConfig
from tests.support.broker_client import store_config
from tests.support.replicas import names, until


@dataclass
class Controlled:
    """A controller and a name server, and the brokers that were started."""

    root: Path
    namesrv: str
    controller: str = ""
    controller_settings: Mapping[str, object] = field(default_factory=dict)
    clock: Clock = field(default_factory=BootClock)
    brokers: dict[int, RunningBroker] = field(default_factory=dict)
    _stacks: dict[int, AsyncExitStack] = field(default_factory=dict)
    _store: MemoryStore = field(init=False)
    _of_controller: AsyncExitStack = field(default_factory=AsyncExitStack)

    def __post_init__(self) -> None:
        self._store = MemoryStore(self.clock)

    async def start_controller(self) -> None:
        """Start the controller; one that was started before gets its state and its port again."""
        port = int(self.controller.rpartition(":")[2] or 0)
        config = ControllerConfig(
            listen_port=port,
            config_store_path=self.root / "controller.properties",
            **self.controller_settings,  # type: ignore[arg-type]
        )
        running = await self._of_controller.enter_async_context(controller(config, self._store, self.clock))
        self.controller = running.address

    async def stop_controller(self) -> None:
        await self._of_controller.aclose()

    async def start(self, number: int, store: Mapping[str, object] = {}, **settings: object) -> RunningBroker:
        """Start a broker; one that was started before gets its data again."""
        config = BrokerConfig(
            namesrv_addr=self.namesrv,
            broker_name="broker-a",
            listen_port=0,
            metrics_port=-1,
            enable_controller_mode=True,
            controller_addr=self.controller,
            wait_time_mills_in_send_queue=5000,
            **settings,  # type: ignore[arg-type]
        )
        stack = AsyncExitStack()
        running = await stack.enter_async_context(broker(config, store_config(self.root / f"store-{number}", **store)))
        self.brokers[number], self._stacks[number] = running, stack
        return running

    async def stop(self, number: int) -> None:
        del self.brokers[number]
        await self._stacks.pop(number).aclose()

    def role(self, number: int) -> HaRole:
        return replication_of(self.brokers[number]).role

    async def elect(self, number: int) -> RunningBroker:
        """Let a broker be elected while all of them run, as an operator can; it is master when this returns."""
        chosen = self.brokers[number]
        header = ElectMasterRequest(
            cluster_name="DefaultCluster",
            broker_name="broker-a",
            broker_id=replication_of(chosen).broker_id or 0,
            designate_elect=True,
        )
        connection = await connect(self.controller)
        reply = await connection.request(request(RequestCode.CONTROLLER_ELECT_MASTER, header), 5)
        assert reply.code == 0, reply
        await connection.drain(1)
        await until(lambda: self.role(number) is HaRole.MASTER)
        assert await self.master(members=len(self.brokers)) == number
        return chosen

    async def master(self, *, members: int = 1) -> int:
        """Wait for a master that has so many members in sync; its number."""

        def found() -> list[int]:
            return [
                number
                for number, one in self.brokers.items()
                if self.role(number) is HaRole.MASTER
                and one.config.broker.broker_id == 0
                and one.store.is_writable
                and len(replication_of(one).sync_state_set) >= members
            ]

        await until(lambda: len(found()) == 1)
        return found()[0]


def replication_of(running: RunningBroker) -> AutoSwitchReplication:
    assert isinstance(running.replication, AutoSwitchReplication)
    return running.replication


@asynccontextmanager
async def controlled(
    root: Path,
    brokers: int = 3,
    store: Mapping[str, object] = {},
    controller_settings: Mapping[str, object] = {},
    tls: TlsConfig = NO_TLS,
    settings: Mapping[str, object] = {},
) -> AsyncIterator[Controlled]:
    """So many brokers, all of them in the sync-state set."""
    async with names(root, tls) as namesrv:
        cluster = Controlled(root, namesrv, controller_settings={"tls": tls, **controller_settings})
        await cluster.start_controller()
        try:
            for number in range(1, brokers + 1):
                await cluster.start(number, store, tls=tls, **settings)
                await cluster.master()
            await cluster.master(members=brokers)
            yield cluster
        finally:
            for number in list(cluster.brokers):
                await cluster.stop(number)
            await cluster.stop_controller()
