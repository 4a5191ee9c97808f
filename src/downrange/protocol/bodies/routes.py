"""Routes: which brokers serve a topic, and which brokers a cluster has."""

from __future__ import annotations

from msgspec import field

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32
from downrange.protocol.bodies.topics import TopicQueueMappingInfo

MASTER_ID = 0


class GetRouteInfoRequest(Header, frozen=True):
    """Request 105: the route of a topic."""

    topic: str = ""
    accept_standard_json_only: bool | None = None


class QueueData(Body, frozen=True, kw_only=True):
    """The number of queues of a topic on one broker, and their permission."""

    broker_name: str
    read_queue_nums: Int32 = 0
    write_queue_nums: Int32 = 0
    perm: Int32 = 0
    topic_sys_flag: Int32 = 0
    topic_syn_flag: Int32 | None = None
    """The name of `topic_sys_flag` in 4.8."""


class BrokerData(Body, frozen=True, kw_only=True):
    """The processes behind one broker name: id -> address, id 0 is the master."""

    cluster: str
    broker_name: str
    broker_addrs: dict[int, str]
    enable_acting_master: bool | None = None
    zone_name: str | None = None

    @property
    def master_address(self) -> str | None:
        return self.broker_addrs.get(MASTER_ID)


class TopicRouteData(Body, frozen=True, kw_only=True):
    """The answer to 105."""

    broker_datas: tuple[BrokerData, ...] = ()
    queue_datas: tuple[QueueData, ...] = ()
    order_topic_conf: str | None = None
    filter_server_table: dict[str, list[str]] = field(default_factory=dict)
    topic_queue_mapping_by_broker: dict[str, TopicQueueMappingInfo] | None = None


class ClusterInfo(Body, frozen=True, kw_only=True):
    """The answer to 106: broker name -> broker, cluster name -> its broker names."""

    broker_addr_table: dict[str, BrokerData] = field(default_factory=dict)
    cluster_addr_table: dict[str, frozenset[str]] = field(default_factory=dict)


class TopicList(Body, frozen=True):
    """The answer to requests 206, 224, 304, 305, 311-313: names of topics; 304 adds the address of a live broker."""

    topic_list: tuple[str, ...] = ()
    broker_addr: str | None = None


class TopicsByClusterRequest(Header, frozen=True):
    """Request 224: the topics of a cluster."""

    cluster: str


class BrokerNameRequest(Header, frozen=True):
    """Requests 205 WIPE_WRITE_PERM_OF_BROKER and 327 ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermResponse(Header, frozen=True):
    """The answer to request 205: the number of topics that lost the permission."""

    wipe_topic_count: Int32


class AddWritePermResponse(Header, frozen=True):
    """The answer to request 327: the number of topics that got the permission back."""

    add_topic_count: Int32
