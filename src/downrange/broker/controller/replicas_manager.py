"""Keeps a broker in touch with its controller, and obeys: identity, heartbeats, polls, elections. [ReplicasManager]

A broker starts without a role: it takes no messages and is not registered with the name servers. It gets its id once
(1012, 1013), registers (1003), and then has the role that the newest known epoch gives it. A notice of a change (1008)
only wakes the poll (1004): what it says is never believed without asking the leading controller.

A master whose lease ran out, or whose process began anew, is no master any more, also if the controller still says so:
it registers again, for which our controllers give it a newer epoch, and only that brings the role back. Apache
RocketMQ's controller grants no leases and keeps the epoch of a master; under such a one the epoch is taken up again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from downrange.broker.controller.controller_requests import ControllerRequests, MustRegister, ReplicaInfo
from downrange.broker.controller.controllers import Controllers, NoController
from downrange.broker.controller.identity import IDENTITY, Application, IdentityFiles
from downrange.broker.live_config import LiveConfig
from downrange.broker.metrics import ReplicaFigures
from downrange.broker.replication.auto_switch import HaRole, ProposalAnswer, Propose, boot_seconds
from downrange.clock import Clock
from downrange.model.errors import MQError
from downrange.model.fencing import may_enter, may_lead
from downrange.protocol.bodies.controller import HeartbeatResponse
from downrange.protocol.bodies.members import BrokerHeartbeatRequest
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request

log = logging.getLogger(__name__)


_RETRY_SECONDS: Final = 0.2
# Apache RocketMQ's controller grants no leases: its masters are masters until they hear of another one.
_FOR_EVER_MILLIS: Final = 1 << 53


class Replica(Protocol):
    """The replication of this broker, as far as its dealings with a controller go; see `AutoSwitchReplication`."""

    broker_id: int | None
    on_given_up: Callable[[], object]
    role: HaRole
    epoch: int

    @property
    def propose(self) -> Propose | None: ...
    @propose.setter
    def propose(self, propose: Propose) -> None: ...
    @property
    def seen_epoch(self) -> int: ...
    @property
    def max_offset(self) -> int: ...
    @property
    def confirm_offset(self) -> int: ...
    @property
    def sync_state_set(self) -> frozenset[int]: ...
    @property
    def sync_state_set_epoch(self) -> int: ...
    @property
    def lease_left_seconds(self) -> float: ...
    def renewed(self, sent_at: float, lease_millis: int, epoch: int) -> None: ...
    def sync_state_set_committed(self, sync_state_set: frozenset[int], sync_state_set_epoch: int) -> None: ...


class Lease(NamedTuple):
    """The word of a controller that this broker is master, for so long after the question was sent."""

    sent_at: float
    millis: int


class Office(Protocol):
    """Changes the role of the broker's own parts."""

    async def become_master(self, info: ReplicaInfo, lease: Lease) -> None: ...

    async def become_slave(self, info: ReplicaInfo, broker_id: int) -> None: ...

    async def resign(self) -> None:
        """Be no master and no slave."""


@dataclass(eq=False)
class ReplicasManager:
    """One broker's dealings with its controllers; `run` must run for as long as the broker does."""

    _config: LiveConfig
    _controllers: Controllers
    _files: IdentityFiles
    _replication: Replica
    _office: Office
    _clock: Clock
    broker_id: int | None = field(init=False, default=None)
    """The controller id; None until the controller gave one."""
    elections_won: int = field(init=False, default=0)
    master_address: str | None = field(init=False, default=None)
    _wanted: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _is_registered: bool = field(init=False, default=False)
    _trouble: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._ask = ControllerRequests(self._config, self._controllers, self._clock.now)
        self._replication.propose = self._propose
        self._replication.on_given_up = self._given_up

    def __repr__(self) -> str:
        own = self._replication
        return f"<ReplicasManager id={self.broker_id} role={own.role.value} epoch={own.epoch} {self._controllers!r}>"

    def figures(self) -> ReplicaFigures:
        own = self._replication
        is_master = own.role is HaRole.MASTER
        members = len(own.sync_state_set) if is_master else 0
        left = max(0.0, own.lease_left_seconds) if is_master else 0.0
        return ReplicaFigures(own.role.value, own.epoch, members, left, self.elections_won)

    def has_other_master(self) -> bool:
        """Whether another broker is master, as far as this one knows."""
        return self._replication.role is HaRole.SLAVE

    # --- what others tell -----------------------------------------------------------------------------------------

    def notified(self, master_epoch: int | None) -> None:
        """Request 1008 came: somebody was elected."""
        if master_epoch is None or master_epoch > self._replication.epoch:
            self._wanted.set()

    def _given_up(self) -> None:
        """The replication gave up the role of master because the lease ran out."""
        log.warning("role given up reason=no controller renewed the lease epoch=%d", self._replication.epoch)
        self._wanted.set()

    async def _propose(self, members: frozenset[int], old_epoch: int) -> ProposalAnswer:
        assert self.broker_id is not None
        return await self._ask.alter_sync_state_set(self.broker_id, self._replication.epoch, members, old_epoch)

    # --- running --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self.broker_id = await self._identified()
        self._replication.broker_id = self.broker_id
        log.info("broker id=%d", self.broker_id)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_heartbeats())
            tasks.create_task(self._obey())
            tasks.create_task(self._follow_controllers())

    async def _obey(self) -> None:
        """Ask who is master, regularly and after each piece of news, and take the role that follows from the answer."""
        while True:
            pause = self._config.broker.sync_broker_metadata_period / 1000
            self._wanted.clear()
            try:
                await self._take_role()
                self._well()
            except MustRegister as error:
                if not self._is_registered:
                    self._say(
                        f"the controllers do not know the broker set of this broker, whose id was {self.broker_id}: an "
                        f"operator made them forget it ({error}). The first broker that gets a new id becomes master, "
                        f"so begin with the one that was master last: delete the file {IDENTITY} in its store "
                        "directory and start it again; then do the same with the others"
                    )
                self._is_registered = False
                pause = _RETRY_SECONDS
            except MQError as error:
                self._say(f"no role from the controller: {error}")
                pause = _RETRY_SECONDS
            if self._replication.role is HaRole.FENCED:
                pause = min(pause, _RETRY_SECONDS)
            await self._news_within(pause)

    async def _take_role(self) -> None:
        assert self.broker_id is not None
        if self._replication.role is HaRole.FENCED or not self._is_registered:
            await self._office.resign()
            info = await self._register()
            self._is_registered = True
            await self._heartbeat()  # a broker that was never heard of is not elected
        else:
            info = await self._ask.replica_info()
        await self._adopt(info)
        if self._replication.role is HaRole.FENCED:
            elected = await self._ask.elect(self.broker_id)
            if elected is None:
                self._say("no broker can be elected: none that has all acknowledged messages is alive")
            else:
                await self._adopt(elected, is_elected=True)

    async def _register(self) -> ReplicaInfo:
        """Register, with another id if an operator made the controllers forget this one.

        Raises MustRegister when the whole set was forgotten. Then whoever gets an id first becomes master, whatever is
        in its log: that is for the operator to choose.
        """
        assert self.broker_id is not None
        try:
            return await self._ask.register(self.broker_id)
        except MustRegister:
            await self._ask.replica_info()
        forgotten = self.broker_id
        self.broker_id = await self._apply_for_id()
        self._replication.broker_id = self.broker_id
        log.warning("another broker id=%d: an operator made the controllers forget id %d", self.broker_id, forgotten)
        return await self._ask.register(self.broker_id)

    async def _adopt(self, info: ReplicaInfo, *, is_elected: bool = False) -> None:
        """Take the role that the controller's view of the broker set gives this broker."""
        own = self._replication
        epoch, master = info.master_epoch, info.master_id
        if not may_enter(epoch, own.seen_epoch) or epoch < own.epoch:
            return
        if epoch == own.epoch and own.role is not HaRole.FENCED:
            if own.role is HaRole.MASTER:
                own.sync_state_set_committed(info.sync_state_set, info.sync_state_set_epoch)
            return
        if master is None:
            if own.role is not HaRole.FENCED:
                await self._office.resign()
        elif master != self.broker_id:
            await self._follow(info)
        elif may_lead(epoch, own.seen_epoch) or (is_elected and self._controllers.is_java):
            await self._lead(info)

    async def _lead(self, info: ReplicaInfo) -> None:
        lease = Lease(0.0, _FOR_EVER_MILLIS)
        if not self._controllers.is_java:  # the first sender may come at once: a lease is there before it
            answered = await self._heartbeat()
            if answered is None or answered[0] != info.master_epoch:
                raise NoController("the election is over already")
            lease = answered[1]
        await self._office.become_master(info, lease)
        self.master_address = None
        self.elections_won += 1
        log.info("master epoch=%d syncStateSet=%s", info.master_epoch, sorted(info.sync_state_set))

    async def _follow(self, info: ReplicaInfo) -> None:
        assert self.broker_id is not None
        await self._office.become_slave(info, self.broker_id)
        self.master_address = info.master_address
        log.info("slave epoch=%d master=%s", info.master_epoch, info.master_address)

    async def _follow_controllers(self) -> None:
        """Ask now and then which controller leads: another one may, without this broker having noticed."""
        while True:
            await self._clock.sleep(self._config.broker.sync_controller_metadata_period / 1000)
            await self._attempt(self._controllers.find_leader())

    async def _news_within(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        except TimeoutError:
            pass

    # --- heartbeats -----------------------------------------------------------------------------------------------

    async def _send_heartbeats(self) -> None:
        while True:
            pause = self._config.broker.broker_heartbeat_interval / 1000
            if not await self._attempt(self._heartbeat()):
                pause = min(pause, _RETRY_SECONDS)
            await self._clock.sleep(pause)

    async def _heartbeat(self) -> tuple[int, Lease] | None:
        """Request 904; the answer of our own controllers renews the lease of a master, in the epoch that it names."""
        command = self._heartbeat_request()
        if self._controllers.is_java:
            self._controllers.tell_others(command, with_leader=True)
            return None
        self._controllers.tell_others(command)
        own, asked_as = self._replication, self.broker_id
        sent_at = boot_seconds()
        reply = await self._controllers.ask(command)
        if reply.code == ResponseCode.BROKER_NEED_TO_BE_REGISTERED and asked_as == self.broker_id:
            self._is_registered = False
            self._wanted.set()
        answer = reply.header(HeartbeatResponse) if reply.code == 0 else HeartbeatResponse()
        if answer.lease_millis is None or answer.master_epoch is None:
            if own.role is HaRole.MASTER:
                self._wanted.set()
            return None
        own.renewed(sent_at, answer.lease_millis, answer.master_epoch)
        if answer.master_epoch > own.epoch or (answer.sync_state_set_epoch or 0) > own.sync_state_set_epoch:
            self._wanted.set()
        return answer.master_epoch, Lease(sent_at, answer.lease_millis)

    def _heartbeat_request(self) -> Command:
        broker, own = self._config.broker, self._replication
        header = BrokerHeartbeatRequest(
            cluster_name=broker.broker_cluster_name,
            broker_addr=broker.address,
            broker_name=broker.broker_name,
            broker_id=self.broker_id,
            epoch=own.epoch,
            max_offset=own.max_offset,
            confirm_offset=own.confirm_offset,
            heartbeat_timeout_mills=broker.controller_heart_beat_timeout_mills,
            election_priority=broker.broker_election_priority,
        )
        return request(RequestCode.BROKER_HEARTBEAT, header)

    # --- identity -------------------------------------------------------------------------------------------------

    async def _identified(self) -> int:
        """The id of this broker, which the controller gives it once and for ever."""
        while True:
            try:
                known = self._files.broker_id()
                if known is not None:
                    return known
                return await self._apply_for_id()
            except (MQError, OSError) as error:
                self._say(f"no broker id: {error}")
                await self._clock.sleep(_RETRY_SECONDS)

    async def _apply_for_id(self) -> int:
        while True:
            application = self._files.application()
            if application is None:
                wanted = await self._ask.next_broker_id()
                application = Application(wanted, f"{self._config.broker.address};{self._clock.now()}")
                self._files.apply(application)
            if await self._ask.apply_broker_id(*application):
                self._files.accepted(application.broker_id)
                return application.broker_id
            self._files.withdraw()

    # --- trouble --------------------------------------------------------------------------------------------------

    async def _attempt(self, action: Awaitable[object]) -> bool:
        """Do something that is done again soon anyway; whether it worked."""
        try:
            await action
        except MQError as error:
            self._say(f"controller not reached: {error}")
            return False
        return True

    def _say(self, trouble: str) -> None:
        """One line in the log for many attempts that fail alike."""
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s", trouble)

    def _well(self) -> None:
        self._trouble = ""
