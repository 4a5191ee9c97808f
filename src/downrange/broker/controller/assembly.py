"""Puts together the parts that only a broker under a controller has."""

from __future__ import annotations

from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from downrange.broker.controller.controllers import Controllers
from downrange.broker.controller.duties import Duties
from downrange.broker.controller.identity import IdentityFiles
from downrange.broker.controller.master_port import MasterPort
from downrange.broker.controller.replicas_manager import ReplicasManager
from downrange.broker.controller.role_change import RoleChange
from downrange.broker.handlers.replicas import ReplicaHandlers
from downrange.broker.live_config import LiveConfig
from downrange.broker.message_writer import MessageWriter
from downrange.broker.replication.auto_switch import AutoSwitchReplication
from downrange.broker.role_services import RoleServices
from downrange.broker.services.registration import Registration
from downrange.broker.services.slave_sync import SlaveSync
from downrange.broker.signed_pool import signed_pool
from downrange.clock import Clock
from downrange.model.message import TopicQueue
from downrange.store.config import BrokerRole
from downrange.transport.signed_pool import SignedPool


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of every broker that a controller's orders reach."""

    live: LiveConfig
    writer: MessageWriter
    registration: Registration
    sync: SlaveSync
    pool: SignedPool
    """To the master."""
    clock: Clock


class ControlledBroker:
    """A broker whose role a controller decides."""

    def __init__(
        self, around: Surroundings, replication: AutoSwitchReplication, duties: Duties, for_master: RoleServices
    ) -> None:
        live, clock = around.live, around.clock
        self.pool = signed_pool(live.broker)
        """To the controllers."""
        self._for_master = for_master
        around.sync.journal = duties.journal

        def dispatched(queues: Collection[TopicQueue]) -> None:
            duties.journal.dispatched(queues)
            if live.store.broker_role is BrokerRole.SLAVE:
                around.sync.received(queues)

        around.writer.on_dispatched = dispatched
        replication.on_truncated = duties.log_cut
        port = MasterPort(around.registration, replication, around.pool, clock)
        self._for_slave = RoleServices(table_copy=around.sync.run, master_port=port.run)
        broker = live.broker
        files = IdentityFiles(live.store.store_path_root_dir, broker.broker_cluster_name, broker.broker_name)
        office = RoleChange(
            live, replication, duties, (for_master, self._for_slave), duties.topics, around.registration
        )
        self.manager = ReplicasManager(live, Controllers(live, self.pool), files, replication, office, clock)
        self.handlers = ReplicaHandlers(live, replication, self.manager)

    def services(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"replicas_manager": self.manager.run(), "for_slave": self._for_slave.run()}

    async def close(self) -> None:
        await self.pool.close()
