"""A controller that answers as Apache RocketMQ's 5.3.3 did in the captures: without leases, in JAVA frames."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from downrange.protocol.bodies.body import decode_body, encode_body
from downrange.protocol.bodies.controller import (
    AlterSyncStateSetResponse,
    ApplyBrokerIdRequest,
    BrokerSetResponse,
    ElectMasterBody,
    ElectMasterRequest,
    ElectMasterResponse,
    GetMetadataInfoResponse,
    GetNextBrokerIdResponse,
    GetReplicaInfoResponse,
    RegisterBrokerToControllerRequest,
    RegisterBrokerToControllerResponse,
    SyncStateSet,
)
from downrange.protocol.codes import LanguageCode, RequestCode, ResponseCode
from downrange.protocol.command import Command
from downrange.transport.connection import Connection
from downrange.transport.server import Server
from downrange.transport.serving import refuse, serve_commands


@dataclass(eq=False)
class JavaController:
    """One broker set. `alive` is what tests say: the replicas that may be elected."""

    address: str = ""
    requests: list[Command] = field(default_factory=list)
    next_id: int = 1
    codes: dict[int, str] = field(default_factory=dict)
    master: int | None = None
    epoch: int = 0
    members: frozenset[int] = frozenset()
    set_epoch: int = 0
    loses_answers_to: set[int] = field(default_factory=set)

    def asked(self, *, without: tuple[int, ...] = (904, 1004)) -> list[int]:
        """The codes of the requests that came, in their order."""
        return [command.code for command in self.requests if command.code not in without]

    def elect(self, broker_id: int) -> None:
        self.master, self.epoch, self.members = broker_id, self.epoch + 1, frozenset({broker_id})
        self.set_epoch += 1

    def _address_of(self, broker_id: int | None) -> str | None:
        return None if broker_id is None else self.codes[broker_id].partition(";")[0]

    @property
    def _set(self) -> bytes:
        return encode_body(SyncStateSet(sync_state_set=self.members, sync_state_set_epoch=self.set_epoch))

    def answer(self, command: Command, connection: Connection) -> Command | None:
        self.requests.append(command)
        handler = {
            RequestCode.CONTROLLER_GET_METADATA_INFO: self._metadata,
            RequestCode.CONTROLLER_GET_NEXT_BROKER_ID: self._next_id,
            RequestCode.CONTROLLER_APPLY_BROKER_ID: self._apply,
            RequestCode.CONTROLLER_REGISTER_BROKER: self._register,
            RequestCode.CONTROLLER_ELECT_MASTER: self._elect,
            RequestCode.CONTROLLER_GET_REPLICA_INFO: self._replica_info,
            RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET: self._alter,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
        }.get(RequestCode(command.code))
        reply = refuse(command, connection) if handler is None else handler(command)
        if command.code in self.loses_answers_to:
            self.loses_answers_to.discard(command.code)
            connection.abort()
            return None
        return None if command.is_oneway else msgspec.structs.replace(reply, language=LanguageCode.JAVA, version=0)

    def _heartbeat(self, command: Command) -> Command:
        return command.reply(remark="Heart beat success")

    def _metadata(self, command: Command) -> Command:
        header = GetMetadataInfoResponse(
            group="group1",
            controller_leader_id="n0",
            controller_leader_address=self.address,
            is_leader=True,
            peers=f"n0:{self.address};",
        )
        return command.reply(header=header)

    def _next_id(self, command: Command) -> Command:
        return command.reply(header=GetNextBrokerIdResponse(next_broker_id=self.next_id))

    def _apply(self, command: Command) -> Command:
        header = command.header(ApplyBrokerIdRequest)
        names = BrokerSetResponse(cluster_name=header.cluster_name, broker_name=header.broker_name)
        known = self.codes.setdefault(header.applied_broker_id, header.register_check_code)
        if known != header.register_check_code:
            return command.reply(ResponseCode.BROKER_ID_INVALID, "refused", header=names)
        self.next_id = max(self.next_id, header.applied_broker_id + 1)
        return command.reply(header=names)

    def _register(self, command: Command) -> Command:
        header = command.header(RegisterBrokerToControllerRequest)
        if header.broker_id not in self.codes:
            return command.reply(ResponseCode.BROKER_NEED_TO_BE_REGISTERED, "not registered")
        answer = RegisterBrokerToControllerResponse(cluster_name=header.cluster_name, broker_name=header.broker_name)
        if self.master is not None:
            answer = msgspec.structs.replace(
                answer,
                master_broker_id=self.master,
                master_address=self._address_of(self.master),
                master_epoch=self.epoch,
                sync_state_set_epoch=self.set_epoch,
            )
        return command.reply(header=answer, body=self._set)

    def _elect(self, command: Command) -> Command:
        asking = command.header(ElectMasterRequest).broker_id
        code = ResponseCode.MASTER_STILL_EXIST
        if self.epoch == 0 or (self.master is None and asking in self.members):
            self.elect(asking)
            code = ResponseCode.SUCCESS
        elif self.master is None:
            return command.reply(ResponseCode.ELECT_MASTER_FAILED, "Failed to elect a new master")
        header = ElectMasterResponse(
            master_broker_id=self.master,
            master_address=self._address_of(self.master),
            master_epoch=self.epoch,
            sync_state_set_epoch=self.set_epoch,
        )
        return command.reply(code, header=header, body=encode_body(ElectMasterBody(sync_state_set=self.members)))

    def _replica_info(self, command: Command) -> Command:
        if not self.codes:
            return command.reply(ResponseCode.BROKER_METADATA_NOT_EXIST, "Broker metadata is not existed")
        header = GetReplicaInfoResponse(
            master_broker_id=self.master, master_address=self._address_of(self.master), master_epoch=self.epoch
        )
        return command.reply(header=header, body=self._set)

    def _alter(self, command: Command) -> Command:
        wanted = decode_body(SyncStateSet, command.body_bytes)
        if wanted.sync_state_set_epoch != self.set_epoch:
            header = AlterSyncStateSetResponse()
            return command.reply(ResponseCode.FENCED_SYNC_STATE_SET_EPOCH, "fenced", header=header)
        self.members, self.set_epoch = wanted.sync_state_set, self.set_epoch + 1
        header = AlterSyncStateSetResponse(new_sync_state_set_epoch=self.set_epoch)
        return command.reply(header=header, body=self._set)


@asynccontextmanager
async def java_controller() -> AsyncIterator[JavaController]:
    controller = JavaController()
    server = Server(serve_commands(controller.answer), "127.0.0.1", 0)
    await server.start()
    controller.address = f"127.0.0.1:{server.port}"
    try:
        yield controller
    finally:
        await server.stop()
