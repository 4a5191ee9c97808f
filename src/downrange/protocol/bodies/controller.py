"""Requests of controller mode: 1001-1013 to and from a controller, 904 to it, and 906-908 between brokers.

A broker set is all brokers of one broker name. Its sync-state set has the controller ids of the replicas that hold
everything that may have been acknowledged. Request 904 is a `BrokerHeartbeatRequest`, see members.py.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import field

from downrange.protocol.bodies.body import Body, BodyError
from downrange.protocol.bodies.fields import Header, Int32, Int64
from downrange.protocol.bodies.routes import BrokerData

NO_BROKER_ID: Final = -1
"""The id in request 1002 when no broker asks but the controller itself or an operator who leaves the choice open."""
OPEN_END: Final = 0x7FFF_FFFF_FFFF_FFFF
"""The end of the last entry of an epoch list, whose epoch goes on."""


class SyncStateSet(Body, frozen=True, kw_only=True):
    """The body of requests 1001 and 1008 and of the answers to 1001, 1003 and 1004."""

    sync_state_set: frozenset[Int64] = frozenset()
    sync_state_set_epoch: Int32 = 0


# --- a broker gets its identity ---------------------------------------------------------------------------------------


class GetMetadataInfoResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1005 CONTROLLER_GET_METADATA_INFO, which every controller gives and which has no header."""

    group: str | None = None
    controller_leader_id: str | None = None
    controller_leader_address: str | None = None
    is_leader: bool = False
    peers: str | None = None


class GetNextBrokerIdRequest(Header, frozen=True, kw_only=True):
    """Request 1012 CONTROLLER_GET_NEXT_BROKER_ID: reserves nothing."""

    cluster_name: str
    broker_name: str


class GetNextBrokerIdResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1012."""

    cluster_name: str | None = None
    broker_name: str | None = None
    next_broker_id: Int64


class ApplyBrokerIdRequest(Header, frozen=True, kw_only=True):
    """Request 1013 CONTROLLER_APPLY_BROKER_ID. The check code is `<broker address>;<milliseconds>`."""

    cluster_name: str
    broker_name: str
    applied_broker_id: Int64
    register_check_code: str


class BrokerSetResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1013, accepted or not, and to a refused 1003: names the broker set."""

    cluster_name: str | None = None
    broker_name: str | None = None


class RegisterBrokerToControllerRequest(Header, frozen=True, kw_only=True):
    """Request 1003 CONTROLLER_REGISTER_BROKER."""

    cluster_name: str | None = None
    broker_name: str
    broker_id: Int64
    broker_address: str
    invoke_time: Int64 = 0


class RegisterBrokerToControllerResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1003, with a `SyncStateSet`. Without a live master its four fields are missing."""

    cluster_name: str | None = None
    broker_name: str | None = None
    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


# --- elections and sync-state sets ------------------------------------------------------------------------------------


class ElectMasterRequest(Header, frozen=True, kw_only=True):
    """Request 1002 CONTROLLER_ELECT_MASTER. `designate_elect`: this broker or none."""

    cluster_name: str | None = None
    broker_name: str
    broker_id: Int64 = NO_BROKER_ID
    designate_elect: bool = False
    invoke_time: Int64 = 0
    unclean_elect: bool | None = None
    """Not of RocketMQ: an operator accepts that acknowledged messages may be lost by electing outside of the
    sync-state set, this once."""


class ElectMasterResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1002 with code 0 or 2011, and an `ElectMasterBody`; all missing with other codes."""

    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


class ElectMasterBody(Body, frozen=True, kw_only=True):
    """The body of the answer to request 1002: the set, and with code 0 the addresses of all replicas by id."""

    broker_member_group: BrokerData | None = None
    sync_state_set: frozenset[Int64] = frozenset()


class AlterSyncStateSetRequest(Header, frozen=True, kw_only=True):
    """Request 1001 CONTROLLER_ALTER_SYNC_STATE_SET of a master; the body has the new set and the epoch of the old."""

    broker_name: str
    master_broker_id: Int64
    master_epoch: Int32
    invoke_time: Int64 = 0


class AlterSyncStateSetResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1001, with a `SyncStateSet`; refusals name epoch 0 and have no body."""

    new_sync_state_set_epoch: Int32 = 0


class GetReplicaInfoRequest(Header, frozen=True, kw_only=True):
    """Request 1004 CONTROLLER_GET_REPLICA_INFO."""

    broker_name: str


class GetReplicaInfoResponse(Header, frozen=True, kw_only=True):
    """The answer to request 1004, with a `SyncStateSet`. Without a master its id and address are missing."""

    master_broker_id: Int64 | None = None
    master_address: str | None = None
    master_epoch: Int32 = 0


class HeartbeatResponse(Header, frozen=True, kw_only=True):
    """The answer to a two-way 904 BROKER_HEARTBEAT.

    None of its fields is RocketMQ's, whose answer has no header. They are there only if the broker that asked is the
    recorded master. It trusts two thirds of `lease_millis`, from the moment on in which it sent the request.
    """

    lease_millis: Int64 | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


class NotifyBrokerRoleChangedRequest(Header, frozen=True, kw_only=True):
    """Request 1008 NOTIFY_BROKER_ROLE_CHANGED, one-way from the controller to a broker, with a `SyncStateSet`."""

    master_address: str | None = None
    master_broker_id: Int64 | None = None
    master_epoch: Int32 | None = None
    sync_state_set_epoch: Int32 | None = None


# --- operators --------------------------------------------------------------------------------------------------------


class BrokerReplica(Body, frozen=True, kw_only=True):
    """One replica as the leading controller sees it. Also written by Java with an empty address when it has none."""

    alive: bool | None = None
    broker_address: str = ""
    broker_id: Int64
    broker_name: str = ""


class ReplicasInfo(Body, frozen=True, kw_only=True):
    """All replicas of one broker set."""

    in_sync_replicas: tuple[BrokerReplica, ...] = ()
    master_address: str | None = None
    master_broker_id: Int64 | None = None
    master_epoch: Int32 = 0
    not_in_sync_replicas: tuple[BrokerReplica, ...] = ()
    sync_state_set_epoch: Int32 = 0


class BrokerReplicasInfo(Body, frozen=True, kw_only=True):
    """The answer to request 1006 CONTROLLER_GET_SYNC_STATE_DATA, whose body is a JSON list of broker names."""

    replicas_info_table: dict[str, ReplicasInfo] = field(default_factory=dict)


def encode_broker_names(names: tuple[str, ...]) -> bytes:
    """The body of request 1006."""
    return msgspec.json.encode(names)


def decode_broker_names(body: bytes) -> tuple[str, ...]:
    """The broker names in the body of request 1006. Raises BodyError."""
    try:
        return msgspec.json.decode(body, type=tuple[str, ...])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BodyError(f"the body is not a JSON list of broker names: {error}") from None


class CleanBrokerDataRequest(Header, frozen=True, kw_only=True):
    """Request 1011 CLEAN_BROKER_DATA: forget the named controller ids (joined by `;`), or the whole set."""

    cluster_name: str | None = None
    broker_name: str
    broker_controller_ids_to_clean: str | None = None
    is_clean_living_broker: bool = False
    invoke_time: Int64 = 0


class EpochEntry(Body, frozen=True, kw_only=True):
    """The part of a log that was written in one epoch; the last entry ends at `OPEN_END`."""

    end_offset: Int64 = OPEN_END
    epoch: Int32
    start_offset: Int64


class EpochEntryCache(Body, frozen=True, kw_only=True):
    """The answer to request 1007 GET_BROKER_EPOCH_CACHE. `broker_id` is that of the route: 0 for a master."""

    broker_id: Int64
    broker_name: str
    cluster_name: str
    epoch_list: tuple[EpochEntry, ...] = ()
    max_offset: Int64 = 0


# --- replication between brokers --------------------------------------------------------------------------------------


class ExchangeHAInfo(Header, frozen=True, kw_only=True):
    """Request 906 EXCHANGE_BROKER_HA_INFO and its answer: an empty request asks a master for its three values."""

    master_ha_address: str | None = None
    master_flush_offset: Int64 | None = None
    master_address: str | None = None


class ResetMasterFlushOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 908 RESET_MASTER_FLUSH_OFFSET, to a slave."""

    master_flush_offset: Int64


class HAConnectionInfo(Body, frozen=True, kw_only=True):
    """A slave as its master sees it."""

    addr: str = ""
    diff: Int64 = 0
    in_sync: bool = False
    slave_ack_offset: Int64 = 0
    transfer_from_where: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HAClientInfo(Body, frozen=True, kw_only=True):
    """The replication of a slave; all zero on a master."""

    last_read_timestamp: Int64 = 0
    last_write_timestamp: Int64 = 0
    master_addr: str | None = None
    master_flush_offset: Int64 = 0
    max_offset: Int64 = 0
    transferred_byte_in_second: Int64 = 0


class HARuntimeInfo(Body, frozen=True, kw_only=True):
    """The answer of a broker to request 907 GET_BROKER_HA_STATUS."""

    ha_client_runtime_info: HAClientInfo = HAClientInfo()
    ha_connection_info: tuple[HAConnectionInfo, ...] = ()
    in_sync_slave_nums: Int32 = 0
    master: bool = False
    master_commit_log_max_offset: Int64 = 0
