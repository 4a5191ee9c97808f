"""The requests of one broker to the leading controller, each as a method that returns what it decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from downrange.broker.controller.controllers import Controllers
from downrange.broker.live_config import LiveConfig
from downrange.broker.replication.auto_switch import ProposalAnswer
from downrange.model.errors import MQError
from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.controller import (
    AlterSyncStateSetRequest,
    ApplyBrokerIdRequest,
    ElectMasterBody,
    ElectMasterRequest,
    ElectMasterResponse,
    GetNextBrokerIdRequest,
    GetNextBrokerIdResponse,
    GetReplicaInfoRequest,
    GetReplicaInfoResponse,
    RegisterBrokerToControllerRequest,
    RegisterBrokerToControllerResponse,
    SyncStateSet,
)
from downrange.protocol.bodies.fields import Header
from downrange.protocol.codes import RequestCode, ResponseCode
from downrange.protocol.command import Command, request
from downrange.protocol.errors import broker_error

_DEFINITE = frozenset(
    {
        ResponseCode.FENCED_MASTER_EPOCH,
        ResponseCode.FENCED_SYNC_STATE_SET_EPOCH,
        ResponseCode.INVALID_MASTER,
        ResponseCode.INVALID_REPLICAS,
        ResponseCode.BROKER_NOT_ALIVE,
        ResponseCode.ALTER_SYNC_STATE_SET_FAILED,
    }
)


class MustRegister(MQError):
    """The controller does not know this broker, or not its broker set: it has to register (again)."""


class ReplicaInfo(NamedTuple):
    """A broker set as the controller sees it."""

    master_epoch: int
    master_id: int | None = None
    master_address: str | None = None
    sync_state_set: frozenset[int] = frozenset()
    sync_state_set_epoch: int = 0


class ControllerRequests:
    """What a broker asks of its controller. Every method raises MQError when there is no definite answer."""

    def __init__(self, config: LiveConfig, controllers: Controllers, now: Callable[[], int]) -> None:
        self._config = config
        self._controllers = controllers
        self._now = now

    @property
    def _names(self) -> tuple[str, str]:
        return self._config.broker.broker_cluster_name, self._config.broker.broker_name

    async def _ask(self, code: RequestCode, header: Header, body: bytes = b"") -> Command:
        return await self._controllers.ask(request(code, header, body=body))

    async def next_broker_id(self) -> int:
        """Request 1012: an id that is free now; it is not reserved."""
        cluster, name = self._names
        header = GetNextBrokerIdRequest(cluster_name=cluster, broker_name=name)
        reply = await self._ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, header)
        _check(reply)
        return reply.header(GetNextBrokerIdResponse).next_broker_id

    async def apply_broker_id(self, broker_id: int, check_code: str) -> bool:
        """Request 1013: whether the id is this broker's now."""
        cluster, name = self._names
        header = ApplyBrokerIdRequest(
            cluster_name=cluster, broker_name=name, applied_broker_id=broker_id, register_check_code=check_code
        )
        reply = await self._ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, header)
        if reply.code == ResponseCode.BROKER_ID_INVALID:
            return False
        _check(reply)
        return True

    async def register(self, broker_id: int) -> ReplicaInfo:
        """Request 1003; raises MustRegister when the controller does not know the id."""
        cluster, name = self._names
        header = RegisterBrokerToControllerRequest(
            cluster_name=cluster,
            broker_name=name,
            broker_id=broker_id,
            broker_address=self._config.broker.address,
            invoke_time=self._now(),
        )
        reply = await self._ask(RequestCode.CONTROLLER_REGISTER_BROKER, header)
        _check(reply)
        found = reply.header(RegisterBrokerToControllerResponse)
        members = _members(reply)
        return ReplicaInfo(
            found.master_epoch or 0,
            found.master_broker_id,
            found.master_address,
            members.sync_state_set,
            members.sync_state_set_epoch,
        )

    async def elect(self, broker_id: int) -> ReplicaInfo | None:
        """Request 1002: who is master now; None when nobody can be."""
        cluster, name = self._names
        header = ElectMasterRequest(
            cluster_name=cluster, broker_name=name, broker_id=broker_id, invoke_time=self._now()
        )
        reply = await self._ask(RequestCode.CONTROLLER_ELECT_MASTER, header)
        if reply.code in (ResponseCode.ELECT_MASTER_FAILED, ResponseCode.MASTER_NOT_AVAILABLE):
            return None
        if reply.code != ResponseCode.MASTER_STILL_EXIST:
            _check(reply)
        found = reply.header(ElectMasterResponse)
        members = decode_body(ElectMasterBody, reply.body_bytes).sync_state_set if reply.body else frozenset[int]()
        return ReplicaInfo(
            found.master_epoch or 0,
            found.master_broker_id,
            found.master_address,
            members,
            found.sync_state_set_epoch or 0,
        )

    async def replica_info(self) -> ReplicaInfo:
        """Request 1004; raises MustRegister when the controller does not know the broker set."""
        header = GetReplicaInfoRequest(broker_name=self._names[1])
        reply = await self._ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, header)
        _check(reply)
        found = reply.header(GetReplicaInfoResponse)
        members = _members(reply)
        return ReplicaInfo(
            found.master_epoch,
            found.master_broker_id,
            found.master_address,
            members.sync_state_set,
            members.sync_state_set_epoch,
        )

    async def alter_sync_state_set(
        self, broker_id: int, master_epoch: int, members: frozenset[int], old_epoch: int
    ) -> ProposalAnswer:
        """Request 1001: the new set in place of the one with `old_epoch`."""
        header = AlterSyncStateSetRequest(
            broker_name=self._names[1],
            master_broker_id=broker_id,
            master_epoch=master_epoch,
            invoke_time=self._now(),
        )
        body = encode_body(SyncStateSet(sync_state_set=members, sync_state_set_epoch=old_epoch))
        reply = await self._ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, header, body)
        if reply.code in _DEFINITE:
            return ProposalAnswer(reply.code)
        _check(reply)
        changed = _members(reply)
        return ProposalAnswer(0, changed.sync_state_set, changed.sync_state_set_epoch)


def _members(reply: Command) -> SyncStateSet:
    return decode_body(SyncStateSet, reply.body_bytes) if reply.body else SyncStateSet()


def _check(reply: Command) -> None:
    if reply.code in (ResponseCode.BROKER_METADATA_NOT_EXIST, ResponseCode.BROKER_NEED_TO_BE_REGISTERED):
        raise MustRegister(reply.remark or "the controller does not know this broker")
    if reply.code != 0:
        raise broker_error(reply.code, reply.remark)
