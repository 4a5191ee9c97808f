"""Makes a broker master or slave while it runs. [BrokerController.changeToMaster, changeToSlave]

The order matters. A master has the whole log readable, the tables of its predecessor and the leases, half messages and
timers that the log tells of before a client sees it; name servers learn of it last. A master that is deposed first
stops taking messages and answers the senders that wait, then stops what writes by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from downrange.broker.controller.controller_requests import ReplicaInfo
from downrange.broker.controller.replicas_manager import Lease
from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.auto_switch import AutoSwitchReplication, HaRole
from downrange.broker.role_services import RoleServices
from downrange.broker.services.registration import Registration
from downrange.broker.topics import Topics
from downrange.model.errors import MQError
from downrange.store.config import BrokerRole

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.01


class NotMaster(MQError):
    """This broker was elected and is not master any more."""


class MasterDuties(Protocol):
    """What only a master does, and has to be read from log and tables before."""

    def begin(self) -> None:
        """Read what a master has to know; the role changes right after that."""

    def began(self) -> None:
        """The role has changed, and nothing was stored since `begin`."""

    def end(self) -> None:
        """Forget it: another broker is master, or will be."""


@dataclass(eq=False)
class RoleChange:
    """Changes the role of one broker. One change at a time, in the task of the `ReplicasManager`."""

    _config: LiveConfig
    _replication: AutoSwitchReplication
    _duties: MasterDuties
    _services: tuple[RoleServices, RoleServices]
    """The services that run only on a master, and those that run only on a slave."""
    _topics: Topics
    _registration: Registration
    _registering: set[asyncio.Task[None]] = field(init=False, default_factory=set)

    async def become_master(self, info: ReplicaInfo, lease: Lease) -> None:
        for_master, for_slave = self._services
        await for_slave.stop()
        await for_master.stop()  # this broker may have been master in an earlier epoch
        self._registration.master_address = None
        own = self._replication
        await own.become_master(info.master_epoch, info.sync_state_set, info.sync_state_set_epoch)
        own.renewed(lease.sent_at, lease.millis, info.master_epoch)
        inherited = own.max_offset
        while own.confirm_offset < inherited:  # at once, unless there are more members that have to follow first
            if own.role is not HaRole.MASTER:
                raise NotMaster("the lease ran out before the other members of the sync-state set followed")
            await asyncio.sleep(_LOOK_SECONDS)
        self._duties.begin()
        self._set_role(BrokerRole.SYNC_MASTER, 0)
        self._duties.began()
        for_master.start()
        self._announce(info.master_epoch)

    async def become_slave(self, info: ReplicaInfo, broker_id: int) -> None:
        await self._lay_down(broker_id)
        self._registration.master_address = info.master_address
        await self._replication.become_slave(info.master_epoch, None)
        self._services[1].start()
        self._announce(info.master_epoch)

    async def resign(self) -> None:
        """Be neither master nor slave, until an election gives this broker a role again."""
        await self._lay_down(self._config.broker.broker_id)

    async def _lay_down(self, broker_id: int) -> None:
        for_master, for_slave = self._services
        if self._replication.role is not HaRole.FENCED:
            self._replication.give_up()
        was_master = for_master.are_running
        self._set_role(BrokerRole.SLAVE, broker_id)
        await for_slave.stop()
        await for_master.stop()
        if was_master:
            self._duties.end()

    def _set_role(self, role: BrokerRole, broker_id: int) -> None:
        self._config.store = replace(self._config.store, broker_role=role)
        self._config.broker = replace(self._config.broker, broker_id=broker_id)

    def _announce(self, epoch: int) -> None:
        """Tell the name servers, which may be slow or away: the role does not wait for them."""
        self._registration.is_on = True
        self._topics.enter_epoch(epoch)
        self._later(self._register)

    def _later(self, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(action())
        self._registering.add(task)
        task.add_done_callback(self._registering.discard)

    async def _register(self) -> None:
        await self._registration.register_changes()
