"""The requests a controller answers: 1001-1006, 1009-1013, and the heartbeats of brokers.

Heartbeats, 1005, 1009 and 1010 are answered by every controller, all others by the one that leads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Coroutine, Mapping
from typing import Any, Final, NamedTuple

from downrange.clock import Clock
from downrange.controller.config import REMOTELY_CHANGEABLE, ControllerConfig
from downrange.controller.election import Call
from downrange.controller.leadership import Leadership, Peer
from downrange.controller.liveness import Heard, Liveness, ReplicaKey, heard_of
from downrange.controller.overseer import Overseer
from downrange.controller.sets import BrokerSets
from downrange.controller.state import BrokerSet, Verdict, alter_sync_state_set, apply_broker_id, clean, register
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.controller import (
    AlterSyncStateSetRequest,
    AlterSyncStateSetResponse,
    ApplyBrokerIdRequest,
    BrokerReplica,
    BrokerReplicasInfo,
    BrokerSetResponse,
    CleanBrokerDataRequest,
    ElectMasterBody,
    ElectMasterRequest,
    ElectMasterResponse,
    GetMetadataInfoResponse,
    GetNextBrokerIdRequest,
    GetNextBrokerIdResponse,
    GetReplicaInfoRequest,
    GetReplicaInfoResponse,
    HeartbeatResponse,
    RegisterBrokerToControllerRequest,
    RegisterBrokerToControllerResponse,
    ReplicasInfo,
    SyncStateSet,
    decode_broker_names,
)
from downrange.protocol.bodies.members import BrokerHeartbeatRequest
from downrange.protocol.bodies.routes import BrokerData
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.protocol.errors import BrokerError
from downrange.settings import format_properties, to_properties
from downrange.transport.connection import Connection
from downrange.transport.serving import LaterReply, refuse

log = logging.getLogger(__name__)

Handler = Callable[[Command, Connection], Coroutine[Any, Any, Command]]
MOST_NAMES: Final = 1000
MOST_SETS: Final = 10_000


class Parts(NamedTuple):
    """The parts of a controller that its requests work with."""

    leadership: Leadership
    sets: BrokerSets
    liveness: Liveness
    overseer: Overseer


class ControllerHandlers:
    """Answers the requests of brokers and operators."""

    def __init__(self, parts: Parts, config: ControllerConfig, clock: Clock) -> None:
        self._parts = parts
        self._clock = clock
        self.config = config
        self._tasks: set[asyncio.Task[Command]] = set()
        self._handlers: Mapping[int, Handler] = {
            RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET: self.alter_sync_state_set,
            RequestCode.CONTROLLER_ELECT_MASTER: self.elect_master,
            RequestCode.CONTROLLER_REGISTER_BROKER: self.register_broker,
            RequestCode.CONTROLLER_GET_REPLICA_INFO: self.get_replica_info,
            RequestCode.CONTROLLER_GET_SYNC_STATE_DATA: self.get_sync_state_data,
            RequestCode.CONTROLLER_CLEAN_BROKER_DATA: self.clean_broker_data,
            RequestCode.CONTROLLER_GET_NEXT_BROKER_ID: self.get_next_broker_id,
            RequestCode.CONTROLLER_APPLY_BROKER_ID: self.apply_broker_id,
        }
        self._of_every_controller: Mapping[int, Callable[[Command, Connection], Command]] = {
            RequestCode.BROKER_HEARTBEAT: self.heartbeat,
            RequestCode.CONTROLLER_GET_METADATA_INFO: self.get_metadata_info,
            RequestCode.CONTROLLER_UPDATE_CONTROLLER_CONFIG: self.update_config,
            RequestCode.CONTROLLER_GET_CONTROLLER_CONFIG: self.get_config,
        }

    @property
    def codes(self) -> Container[int]:
        """The request codes that are answered."""
        return {*self._handlers, *self._of_every_controller}

    def __call__(self, command: Command, connection: Connection) -> Command | LaterReply | None:
        handler = self._handlers.get(command.code)
        if handler is None:
            return self._of_every_controller.get(command.code, refuse)(command, connection)
        self._parts.sets.check_leading()
        task = asyncio.get_running_loop().create_task(handler(command, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task  # type: ignore[return-value]  # a reply that comes later and is a command

    def closed(self, connection: Connection) -> None:
        """A connection was closed."""
        self._parts.overseer.closed(connection)

    async def stop(self) -> None:
        """Give up the requests that wait for etcd."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- every controller ---------------------------------------------------------------------------------------

    def heartbeat(self, command: Command, connection: Connection) -> Command:
        """Request 904. The leader tells a master for how long it may go on; Java brokers do not wait for an answer."""
        header = command.header(BrokerHeartbeatRequest)
        if header.broker_id is None:
            return command.reply(ResponseCode.INVALID_REQUEST, "Heart beat with empty brokerId")
        key = ReplicaKey(header.broker_name, header.broker_id)
        if not command.is_oneway and self._is_forgotten(key):
            return command.reply(ResponseCode.BROKER_NEED_TO_BE_REGISTERED, f"no replica {key.broker_id} is known here")
        liveness = self._parts.liveness
        if liveness.is_full(key):
            raise BrokerError("too many replicas send heartbeats to this controller")
        now = self._clock.monotonic()
        if liveness.heartbeat(key, heard_of(header, connection, now)):
            log.info("broker heard set=%s id=%d address=%s", *key, header.broker_addr)
            self._parts.overseer.look_at_settings(key, header.broker_addr)  # also if another controller leads now
        lease = None if command.is_oneway else self._lease(key, now)
        return command.reply(remark="Heart beat success", header=lease)

    def _is_forgotten(self, key: ReplicaKey) -> bool:
        """Whether this controller leads and is sure that no replica has this id, because an operator cleaned it."""
        if self._parts.leadership.term is None:
            return False
        broker_set = self._parts.sets.settled(key.broker_name)
        return broker_set is not None and key.broker_id not in broker_set.replicas

    def _lease(self, key: ReplicaKey, now: float) -> HeartbeatResponse | None:
        if self._parts.leadership.term is None:
            return None
        broker_set = self._parts.sets.settled(key.broker_name)
        if broker_set is None or broker_set.master != key.broker_id:
            return None
        self._parts.liveness.lease(key.broker_name, now + self.config.lease_millis / 1000)
        return HeartbeatResponse(
            lease_millis=self.config.lease_millis,
            master_epoch=broker_set.master_epoch,
            sync_state_set_epoch=broker_set.sync_state_set_epoch,
        )

    def get_metadata_info(self, command: Command, connection: Connection) -> Command:
        """Request 1005."""
        leadership = self._parts.leadership
        leader = leadership.leader
        peers = "".join(f"{peer.id}:{peer.address};" for peer in self.peers())
        return command.reply(
            header=GetMetadataInfoResponse(
                group=self.config.controller_dleger_group,
                controller_leader_id=None if leader is None else leader.id,
                controller_leader_address=None if leader is None else leader.address,
                is_leader=leadership.term is not None,
                peers=peers,
            )
        )

    def peers(self) -> list[Peer]:
        """All controllers that this one knows of."""
        listed = [Peer(*part.split("-", 1)) for part in self.config.controller_dleger_peers.split(";") if "-" in part]
        known = [self._parts.leadership.me, self._parts.leadership.leader]
        return listed or list(dict.fromkeys(peer for peer in known if peer is not None))

    def get_config(self, command: Command, connection: Connection) -> Command:
        """Request 1010."""
        return command.reply(body=format_properties(to_properties(self.config)).encode())

    def update_config(self, command: Command, connection: Connection) -> Command:
        """Request 1009: one wrong key or value, and nothing is changed."""
        changed = REMOTELY_CHANGEABLE.changed(self.config, command.body_bytes)
        REMOTELY_CHANGEABLE.keep(changed, changed.config_store_path)
        self.config = changed
        self._parts.overseer.notifies = changed.notify_broker_role_changed
        log.info("configuration updated %s", " ".join(command.body_bytes.decode().split()))
        return command.reply()

    # --- brokers get their ids ----------------------------------------------------------------------------------

    async def get_next_broker_id(self, command: Command, connection: Connection) -> Command:
        """Request 1012."""
        header = command.header(GetNextBrokerIdRequest)
        broker_set = await self._parts.sets.confirmed(header.broker_name)
        return command.reply(
            header=GetNextBrokerIdResponse(
                cluster_name=header.cluster_name,
                broker_name=header.broker_name,
                next_broker_id=1 if broker_set is None else broker_set.next_broker_id,
            )
        )

    async def apply_broker_id(self, command: Command, connection: Connection) -> Command:
        """Request 1013."""
        header = command.header(ApplyBrokerIdRequest)
        name, cluster = header.broker_name, header.cluster_name

        def event(old: BrokerSet | None) -> Verdict:
            if old is None and len(self._parts.sets) >= MOST_SETS:
                return Verdict(ResponseCode.BROKER_ID_INVALID, f"there are {MOST_SETS} broker sets already")
            return apply_broker_id(old, cluster, name, header.applied_broker_id, header.register_check_code)

        verdict, _ = await self._parts.sets.change(name, event)
        if verdict.after is not None:
            log.info("id given set=%s id=%d check_code=%s", name, header.applied_broker_id, header.register_check_code)
        answer = BrokerSetResponse(cluster_name=cluster, broker_name=name)
        return command.reply(verdict.code, verdict.remark, header=answer)

    async def register_broker(self, command: Command, connection: Connection) -> Command:
        """Request 1003."""
        header = command.header(RegisterBrokerToControllerRequest)
        name, id_ = header.broker_name, header.broker_id
        key = ReplicaKey(name, id_)
        if self.config.refuse_unsafe_brokers and not await self._parts.overseer.is_safe(key, header.broker_address):
            raise BrokerError(
                f"{header.broker_address} has allAckInSyncStateSet=false, which refuseUnsafeBrokers=true forbids here"
            )

        def event(old: BrokerSet | None) -> Verdict:
            return register(old, name, id_, header.broker_address)

        verdict, after = await self._parts.sets.change(name, event)
        if verdict.code == ResponseCode.SUCCESS:
            self._asked(key, connection, header.broker_address)
        answer = RegisterBrokerToControllerResponse(cluster_name=header.cluster_name, broker_name=name)
        if verdict.code != ResponseCode.SUCCESS or after is None:
            return command.reply(verdict.code, verdict.remark, header=answer)
        if verdict.after is not None and after.master == id_:
            log.warning("master started again set=%s id=%d epoch=%d", name, id_, after.master_epoch)
            self._parts.overseer.tell(after)
        if not self.config.refuse_unsafe_brokers:
            self._parts.overseer.look_at_settings(key, header.broker_address)
        if after.master is not None and self._is_alive(after, after.master):
            answer = RegisterBrokerToControllerResponse(
                cluster_name=header.cluster_name,
                broker_name=name,
                master_broker_id=after.master,
                master_address=after.master_address,
                master_epoch=after.master_epoch,
                sync_state_set_epoch=after.sync_state_set_epoch,
            )
        return command.reply(header=answer, body=encode_body(after.members))

    def _asked(self, key: ReplicaKey, connection: Connection, address: str) -> None:
        heard = Heard(self._clock.monotonic(), connection=connection, address=address)
        self._parts.liveness.asked(key, heard)

    def _is_alive(self, broker_set: BrokerSet, id_: int) -> bool:
        return self._parts.liveness.is_alive(ReplicaKey(broker_set.broker_name, id_), self._clock.monotonic())

    # --- masters ------------------------------------------------------------------------------------------------

    async def elect_master(self, command: Command, connection: Connection) -> Command:
        """Request 1002."""
        header = command.header(ElectMasterRequest)
        call = Call(header.broker_id, header.designate_elect, bool(header.unclean_elect))
        known = self._parts.sets.get(header.broker_name)
        if not call.is_designated and known is not None and (own := known.replicas.get(header.broker_id)) is not None:
            self._asked(ReplicaKey(header.broker_name, header.broker_id), connection, own.address)
        verdict, after = await self._parts.overseer.elect(header.broker_name, call)
        if verdict.code not in (ResponseCode.SUCCESS, ResponseCode.MASTER_STILL_EXIST) or after is None:
            return command.reply(verdict.code, verdict.remark, header=ElectMasterResponse())
        answer = ElectMasterResponse(
            master_broker_id=after.master,
            master_address=after.master_address,
            master_epoch=after.master_epoch,
            sync_state_set_epoch=after.sync_state_set_epoch,
        )
        group = None
        if verdict.code == ResponseCode.SUCCESS:
            addresses = {id_: replica.address for id_, replica in sorted(after.replicas.items())}
            group = BrokerData(cluster=after.cluster_name, broker_name=after.broker_name, broker_addrs=addresses)
        body = ElectMasterBody(broker_member_group=group, sync_state_set=after.sync_state_set)
        return command.reply(verdict.code, verdict.remark, header=answer, body=encode_body(body))

    async def alter_sync_state_set(self, command: Command, connection: Connection) -> Command:
        """Request 1001."""
        header = command.header(AlterSyncStateSetRequest)
        proposed = decode_body(SyncStateSet, command.body_bytes)

        def event(old: BrokerSet | None) -> Verdict:
            alive = self._alive(old) | {header.master_broker_id}  # it asks, so it is
            return alter_sync_state_set(old, header.master_broker_id, header.master_epoch, proposed, alive)

        verdict, after = await self._parts.sets.change(header.broker_name, event)
        if verdict.code != ResponseCode.SUCCESS or after is None:
            log.info("sync-state set kept set=%s reason=%s", header.broker_name, verdict.remark)
            return command.reply(verdict.code, verdict.remark, header=AlterSyncStateSetResponse())
        log.info("sync-state set altered set=%s members=%s", header.broker_name, sorted(after.sync_state_set))
        answer = AlterSyncStateSetResponse(new_sync_state_set_epoch=after.sync_state_set_epoch)
        return command.reply(header=answer, body=encode_body(after.members))

    def _alive(self, broker_set: BrokerSet | None) -> frozenset[int]:
        if broker_set is None:
            return frozenset()
        return self._parts.liveness.alive(broker_set.broker_name, broker_set.replicas, self._clock.monotonic())

    async def get_replica_info(self, command: Command, connection: Connection) -> Command:
        """Request 1004."""
        name = command.header(GetReplicaInfoRequest).broker_name
        sets = self._parts.sets
        broker_set = await sets.confirmed(name) if self.config.is_process_read_event else sets.get(name)
        if broker_set is None or broker_set.is_cleaned:
            return command.reply(ResponseCode.BROKER_METADATA_NOT_EXIST, "Broker metadata is not existed")
        answer = GetReplicaInfoResponse(
            master_broker_id=broker_set.master,
            master_address=broker_set.master_address,
            master_epoch=broker_set.master_epoch,
        )
        return command.reply(header=answer, body=encode_body(broker_set.members))

    # --- operators ----------------------------------------------------------------------------------------------

    async def get_sync_state_data(self, command: Command, connection: Connection) -> Command:
        """Request 1006; sets that are not known are left out. An empty list asks for all (not so in RocketMQ)."""
        names = decode_broker_names(command.body_bytes) or [one.broker_name for one in self._parts.sets]
        found = ((name, self._parts.sets.get(name)) for name in names[:MOST_NAMES])
        table = {name: self._replicas(one) for name, one in found if one is not None and not one.is_cleaned}
        return command.reply(body=encode_body(BrokerReplicasInfo(replicas_info_table=table)))

    def _replicas(self, broker_set: BrokerSet) -> ReplicasInfo:
        alive = self._alive(broker_set)
        rows = [
            BrokerReplica(
                alive=id_ in alive,
                broker_address=replica.address,
                broker_id=id_,
                broker_name=broker_set.broker_name,
            )
            for id_, replica in sorted(broker_set.replicas.items())
        ]
        members = broker_set.sync_state_set
        return ReplicasInfo(
            in_sync_replicas=tuple(row for row in rows if row.broker_id in members),
            master_address=broker_set.master_address,
            master_broker_id=broker_set.master,
            master_epoch=broker_set.master_epoch,
            not_in_sync_replicas=tuple(row for row in rows if row.broker_id not in members),
            sync_state_set_epoch=broker_set.sync_state_set_epoch,
        )

    async def clean_broker_data(self, command: Command, connection: Connection) -> Command:
        """Request 1011."""
        header = command.header(CleanBrokerDataRequest)
        ids = _ids(header.broker_controller_ids_to_clean)

        def event(old: BrokerSet | None) -> Verdict:
            if old is not None and header.cluster_name and header.cluster_name != old.cluster_name:
                wrong = ResponseCode.INVALID_CLEAN_BROKER_METADATA
                return Verdict(wrong, f"broker set {old.broker_name} belongs to cluster {old.cluster_name}")
            return clean(old, ids, self._alive(old), is_clean_living_broker=header.is_clean_living_broker)

        verdict, after = await self._parts.sets.change(header.broker_name, event)
        if verdict.after is not None and after is not None:
            for id_ in after.retired:
                self._parts.liveness.forget(ReplicaKey(header.broker_name, id_))
            log.warning("broker data cleaned set=%s ids=%s", header.broker_name, "all" if ids is None else sorted(ids))
        return command.reply(verdict.code, verdict.remark)


def _ids(text: str | None) -> frozenset[int] | None:
    """The ids of request 1011; None for the whole set."""
    if text is None or not text.strip():
        return None
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
        raise BrokerError(
            f"brokerControllerIdsToClean {text[:64]!r}: expected ids separated by semicolons",
            ResponseCode.INVALID_CLEAN_BROKER_METADATA,
        )
    return frozenset(map(int, parts))
