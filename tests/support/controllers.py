"""Controllers inside a test, and brokers that only speak to controllers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from downrange.clock import BootClock
from downrange.controller.app import RunningController, controller
from downrange.controller.config import ControllerConfig
from downrange.controller.coordination import Coordination
from downrange.controller.memory_store import MemoryStore
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.controller import (
    AlterSyncStateSetRequest,
    ApplyBrokerIdRequest,
    ElectMasterRequest,
    GetReplicaInfoRequest,
    HeartbeatResponse,
    NotifyBrokerRoleChangedRequest,
    RegisterBrokerToControllerRequest,
    SyncStateSet,
)
from downrange.protocol.bodies.members import BrokerHeartbeatRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import Command, request
from downrange.transport.connection import Connection
from downrange.transport.pool import Pool
from downrange.transport.server import Server
from downrange.transport.serving import serve_commands

R = RequestCode


@asynccontextmanager
async def running_controller(
    directory: Path, store: Coordination | None = None, **settings: Any
) -> AsyncIterator[RunningController]:
    """A controller that leads, on a store in memory unless one is given."""
    name = settings.get("controller_dleger_self_id", "n0")
    config = ControllerConfig(
        **{
            "listen_port": 0,
            "config_store_path": directory / f"{name}.properties",
            "scan_not_active_broker_interval": 50,
            "failed_login_wait_mills": 0,
            **settings,
        }
    )
    async with controller(config, store or MemoryStore(BootClock())) as running:
        await until(lambda: running.parts.leadership.leader is not None)
        yield running


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class LonelyBroker:
    """A broker as controllers know it: it has an id, sends heartbeats, and hears of elections. It stores nothing."""

    def __init__(self, controller_address: str, name: str = "b", broker_id: int = 1) -> None:
        self.controller = controller_address
        self.name = name
        self.broker_id = broker_id
        self.heard: list[tuple[NotifyBrokerRoleChangedRequest, SyncStateSet]] = []
        self.bodies: dict[int, bytes] = {R.GET_BROKER_CONFIG: b"allAckInSyncStateSet=true\n"}
        """What it answers to other requests, by code."""
        self.timeout_millis = 3000
        self.epoch = 0
        self.max_offset = 0
        self._server = Server(serve_commands(self._answer))
        self.pool = Pool()

    async def __aenter__(self) -> LonelyBroker:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    @property
    def check_code(self) -> str:
        return f"{self.address};{self.broker_id}"

    async def die(self) -> None:
        """Close everything, as the end of a process does."""
        await self._server.stop()
        await self.pool.close()

    def _answer(self, command: Command, connection: Connection) -> Command | None:
        if command.code == R.CONTROLLER_NOTIFY_BROKER_ROLE_CHANGED:
            body = decode_body(SyncStateSet, command.body_bytes)
            self.heard.append((command.header(NotifyBrokerRoleChangedRequest), body))
            return command.reply()
        return command.reply(body=self.bodies.get(command.code, b""))

    async def ask(self, code: int, header: Any = None, body: bytes = b"") -> Command:
        return await self.pool.request(self.controller, request(code, header, body=body), 10.0)

    async def apply(self) -> Command:
        header = ApplyBrokerIdRequest(
            cluster_name="c",
            broker_name=self.name,
            applied_broker_id=self.broker_id,
            register_check_code=self.check_code,
        )
        return await self.ask(R.CONTROLLER_APPLY_BROKER_ID, header)

    async def register(self) -> Command:
        header = RegisterBrokerToControllerRequest(
            cluster_name="c", broker_name=self.name, broker_id=self.broker_id, broker_address=self.address
        )
        return await self.ask(R.CONTROLLER_REGISTER_BROKER, header)

    async def elect(self, **changes: Any) -> Command:
        fields = {"cluster_name": "c", "broker_name": self.name, "broker_id": self.broker_id, **changes}
        return await self.ask(R.CONTROLLER_ELECT_MASTER, ElectMasterRequest(**fields))

    def heartbeat_request(self) -> BrokerHeartbeatRequest:
        return BrokerHeartbeatRequest(
            cluster_name="c",
            broker_addr=self.address,
            broker_name=self.name,
            broker_id=self.broker_id,
            epoch=self.epoch,
            max_offset=self.max_offset,
            heartbeat_timeout_mills=self.timeout_millis,
        )

    async def heartbeat(self) -> HeartbeatResponse:
        reply = await self.ask(R.BROKER_HEARTBEAT, self.heartbeat_request())
        assert (reply.code, reply.remark) == (0, "Heart beat success")
        return reply.header(HeartbeatResponse)

    async def alter(self, *ids: int, epoch: int, set_epoch: int) -> Command:
        header = AlterSyncStateSetRequest(broker_name=self.name, master_broker_id=self.broker_id, master_epoch=epoch)
        body = encode_body(SyncStateSet(sync_state_set=frozenset(ids), sync_state_set_epoch=set_epoch))
        return await self.ask(R.CONTROLLER_ALTER_SYNC_STATE_SET, header, body)

    async def info(self) -> Command:
        return await self.ask(R.CONTROLLER_GET_REPLICA_INFO, GetReplicaInfoRequest(broker_name=self.name))

    async def join(self) -> None:
        """Get the id and be alive; the first one becomes master."""
        assert (await self.apply()).code == 0
        assert (await self.register()).code == 0
        await self.heartbeat()
        if self.broker_id == 1:
            assert (await self.elect()).code == 0
