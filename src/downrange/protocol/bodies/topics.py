"""The configuration of topics on brokers, and its removal."""

from __future__ import annotations

from msgspec import field

from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header, Int32, Int64


class TopicRequest(Header, frozen=True):
    """Requests about one topic: 202, 215, 217, 300."""

    topic: str


class CreateTopicRequest(Header, frozen=True, kw_only=True):
    """Request 17 UPDATE_AND_CREATE_TOPIC."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool | None = None

    @property
    def config(self) -> TopicConfig:
        return TopicConfig(
            topic_name=self.topic,
            read_queue_nums=self.read_queue_nums,
            write_queue_nums=self.write_queue_nums,
            perm=self.perm,
            topic_filter_type=self.topic_filter_type,
            topic_sys_flag=self.topic_sys_flag or 0,
            order=self.order,
        )


class DeleteTopicInNamesrvRequest(Header, frozen=True):
    """Request 216: delete a topic from the routes, with a cluster name only from the brokers of this cluster."""

    topic: str
    cluster_name: str | None = None


class TopicConfigs(Body, frozen=True):
    """Request 18 (of 5.x): several topics at once."""

    topic_config_list: tuple[TopicConfig, ...] = ()


class TopicQueueMappingInfo(Body, frozen=True, kw_only=True):
    """Static topics of 5.x: which global queue is which queue of the broker `bname`."""

    topic: str
    total_queues: Int32
    bname: str
    scope: str | None = None
    epoch: Int64 = 0
    dirty: bool = False
    curr_id_map: dict[int, int] | None = None


class TopicConfigTable(Body, frozen=True, kw_only=True):
    """The answer to request 21, also part of a registration: all topics by name. [TopicConfigSerializeWrapper]"""

    topic_config_table: dict[str, TopicConfig] = field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    mapping_data_version: DataVersion | None = None
    topic_queue_mapping_info_map: dict[str, TopicQueueMappingInfo] | None = None
