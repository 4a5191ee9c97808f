"""Requests of 5.x about the processes behind one broker name, and their heartbeats to name servers."""

from __future__ import annotations

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32, Int64
from downrange.protocol.bodies.routes import BrokerData


class BrokerMemberGroupRequest(Header, frozen=True, kw_only=True):
    """Request 901 GET_BROKER_MEMBER_GROUP."""

    cluster_name: str
    broker_name: str


class BrokerMemberGroup(Body, frozen=True):
    """The answer to request 901; the member is missing when the broker name is unknown."""

    broker_member_group: BrokerData | None = None


class BrokerHeartbeatRequest(Header, frozen=True, kw_only=True):
    """Request 904 BROKER_HEARTBEAT: keeps a registration alive."""

    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None
    epoch: Int32 | None = None
    max_offset: Int64 | None = None
    confirm_offset: Int64 | None = None
    heartbeat_timeout_mills: Int64 | None = None
    election_priority: Int32 | None = None
