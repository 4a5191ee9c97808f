"""Replicas of one broker set over real sockets, with a controller that is an object in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from downrange.broker.config import BrokerConfig
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.auto_switch import AutoSwitchReplication, HaPort, HaRole, ProposalAnswer
from downrange.broker.replication.in_sync import InSyncSlaves, boot_seconds
from downrange.broker.services.flushing import Flusher
from downrange.broker.services.replication import listening_socket
from downrange.broker.statistics import Statistics
from downrange.broker.waiting_pulls import WaitingPulls
from downrange.clock import SystemClock
from downrange.store.config import BrokerRole
from downrange.store.message_store import MessageStore
from downrange.store.new_message import PutMessageStatus
from downrange.transport.running_services import running_services
from downrange.transport.tls import ClientTls, ServerTls
from tests.unit.store.small_store import bodies, new_message, small_config

LEASE_MILLIS = 3_600_000


async def until(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(0.005)


@dataclass(eq=False)
class Controller:
    """What a controller has committed. `answers` False: requests are carried out, and their answers are lost."""

    epoch: int = 0
    members: frozenset[int] = frozenset()
    set_epoch: int = 0
    master: int = 0
    answers: bool = True
    hears: bool = True
    asked: list[frozenset[int]] = field(default_factory=list)

    async def propose(self, number: int, epoch: int, members: frozenset[int], set_epoch: int) -> ProposalAnswer:
        await asyncio.sleep(0)
        self.asked.append(members)
        if not self.hears:
            raise ConnectionError("the controller is not reached")
        code = 0
        if number != self.master:
            code = 2002
        elif epoch != self.epoch:
            code = 2000
        elif set_epoch != self.set_epoch:
            code = 2001
        else:
            self.members, self.set_epoch = members, set_epoch + 1
        if not self.answers:
            raise ConnectionError("the answer was lost")
        return ProposalAnswer(code, self.members, self.set_epoch) if code == 0 else ProposalAnswer(code)

    async def elect(self, winner: Replica, *others: Replica, members: frozenset[int] | None = None) -> None:
        """Make a replica the master of a new epoch, and tell it and others."""
        self.epoch += 1
        self.set_epoch += 1
        self.master = winner.number
        self.members = members or frozenset((winner.number,))
        await winner.replication.become_master(self.epoch, self.members, self.set_epoch)
        winner.replication.renewed(boot_seconds(), LEASE_MILLIS, self.epoch)
        for other in others:
            await other.replication.become_slave(self.epoch, winner.ha_address)


@dataclass(eq=False)
class Replica:
    """One replica: store, writer and replication, without the rest of a broker."""

    number: int
    store: MessageStore
    writer: MessageWriter
    replication: AutoSwitchReplication
    ha_address: str

    def send(self, body: bytes) -> asyncio.Future[PutMessageStatus]:
        """Store a message; the future says how its sender is answered."""
        told: asyncio.Future[PutMessageStatus] = asyncio.get_running_loop().create_future()
        result = self.writer.append_one(new_message(body))
        if result.status is not PutMessageStatus.PUT_OK:
            told.set_result(result.status)
        else:
            self.writer.tell_when_safe(result.end_offset, told.set_result)
        return told

    @property
    def bodies(self) -> list[bytes]:
        """What a consumer can read."""
        return bodies(self.store)

    @property
    def is_following(self) -> bool:
        replication = self.replication
        return (
            replication.role is HaRole.SLAVE
            and "haMaster" in (info := replication.runtime_info())
            and bool(info["haMaster"])
        )


@asynccontextmanager
async def replica(
    root: Path,
    number: int,
    controller: Controller,
    *,
    tls: tuple[ServerTls | None, ClientTls | None] = (None, None),
    **settings: Any,
) -> AsyncIterator[Replica]:
    """A running replica, which has no role yet."""
    listening = listening_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    config = small_config(root / str(number), broker_role=BrokerRole.SLAVE, ha_listen_port=port, **settings)
    clock = SystemClock()
    store = MessageStore.open(config)
    live = LiveConfig(BrokerConfig(broker_ip1="127.0.0.1"), config)
    flusher = Flusher(store, live, clock)
    slaves = InSyncSlaves(store, live, clock)
    writer = MessageWriter(store, WaitingPulls(), flusher, Statistics(clock.now(), "c"), clock, slaves)
    replication = AutoSwitchReplication(live, writer, flusher, slaves, clock, HaPort(listening, *tls))
    replication.broker_id = number

    async def propose(members: frozenset[int], set_epoch: int) -> ProposalAnswer:
        return await controller.propose(number, replication.epoch, members, set_epoch)

    replication.propose = propose
    try:
        await replication.start()
        async with running_services(flush=flusher.run(writer.dispatched), replication=replication.run()):
            yield Replica(number, store, writer, replication, f"127.0.0.1:{port}")
            await replication.stop()
    finally:
        flusher.close()
        store.close()
        listening.close()
