"""Groups and their members: heartbeats, connections, queue locks, and the configuration of consumer groups."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from msgspec import field

from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.model.topics import SubscriptionGroupConfig
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header, Int32, Int64


class ConsumeType(StrEnum):
    """Whether the consumer pulls by itself or the client library pushes messages to a listener."""

    ACTIVELY = "CONSUME_ACTIVELY"
    PASSIVELY = "CONSUME_PASSIVELY"
    POP = "CONSUME_POP"


class MessageModel(StrEnum):
    """Whether the members of a group share the messages or each get all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(StrEnum):
    """The offset at which a group without a committed offset begins."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


class ProducerData(Body, frozen=True):
    """One producer group of a client."""

    group_name: str


_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "consumeType": (ConsumeType.ACTIVELY, ConsumeType.PASSIVELY, ConsumeType.POP),
    "messageModel": (MessageModel.BROADCASTING, MessageModel.CLUSTERING),
    "consumeFromWhere": (
        ConsumeFromWhere.LAST_OFFSET,
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
        "CONSUME_FROM_MIN_OFFSET",
        "CONSUME_FROM_MAX_OFFSET",
        ConsumeFromWhere.FIRST_OFFSET,
        ConsumeFromWhere.TIMESTAMP,
    ),
}


class ConsumerData(Body, frozen=True, kw_only=True):
    """One consumer group of a client. The three choices are texts, so that values of newer releases can be read."""

    group_name: str
    consume_type: str = ConsumeType.PASSIVELY
    message_model: str = MessageModel.CLUSTERING
    consume_from_where: str = ConsumeFromWhere.LAST_OFFSET
    subscription_data_set: tuple[Subscription, ...] = ()
    unit_mode: bool = False

    @staticmethod
    def from_wire(members: dict[str, Any]) -> dict[str, Any]:
        """Convert the numbers that the C++ client sends where Java sends the names of enumeration values."""
        return members | {
            name: choices[chosen]
            for name, choices in _CHOICES.items()
            if type(chosen := members.get(name)) is int and 0 <= chosen < len(choices)
        }


class HeartbeatData(Body, frozen=True, kw_only=True):
    """Request 34: all groups in which a client takes part."""

    client_id: str = field(name="clientID", default="")
    producer_data_set: tuple[ProducerData, ...] = ()
    consumer_data_set: tuple[ConsumerData, ...] = ()
    heartbeat_fingerprint: Int32 | None = None
    without_sub: bool | None = None


class UnregisterClientRequest(Header, frozen=True, kw_only=True):
    """Request 35: this client leaves these groups; the broker knows the client by its connection."""

    client_id: str = field(name="clientID", default="")
    producer_group: str | None = None
    consumer_group: str | None = None


class CheckClientBody(Body, frozen=True, kw_only=True):
    """Request 46: whether a subscription compiles."""

    client_id: str
    group: str
    subscription_data: Subscription


class ConsumerGroupRequest(Header, frozen=True):
    """Requests 38 GET_CONSUMER_LIST_BY_GROUP, 40 NOTIFY_CONSUMER_IDS_CHANGED, 203 GET_CONSUMER_CONNECTION_LIST."""

    consumer_group: str


class ProducerGroupRequest(Header, frozen=True):
    """Request 204 GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


class ConsumerIds(Body, frozen=True):
    """The answer to request 38: the client ids of a group, one entry per connection."""

    consumer_id_list: tuple[str, ...] = ()


class LockBatchBody(Body, frozen=True, kw_only=True):
    """Requests 41 and 42: queues that a client wants to lock or unlock for orderly consumption."""

    consumer_group: str
    client_id: str
    mq_set: frozenset[MessageQueue] = frozenset()
    only_this_broker: bool | None = None


class LockedQueues(Body, frozen=True):
    """The answer to request 41: the queues the client holds now."""

    lock_ok_mq_set: frozenset[MessageQueue] = field(name="lockOKMQSet", default=frozenset())


class Connection(Body, frozen=True, kw_only=True):
    """One client as a broker sees it."""

    client_id: str
    client_addr: str
    language: str | None = None
    version: Int32 = 0


class ConsumerConnection(Body, frozen=True, kw_only=True):
    """The answer to request 203: the consumers of a group and their subscriptions."""

    connection_set: tuple[Connection, ...] = ()
    subscription_table: dict[str, Subscription] = field(default_factory=dict)
    consume_type: str | None = None
    message_model: str | None = None
    consume_from_where: str | None = None


class ProducerConnection(Body, frozen=True):
    """The answer to request 204."""

    connection_set: tuple[Connection, ...] = ()


class ProducerInfo(Body, frozen=True, kw_only=True):
    """One producer in the answer to request 328."""

    client_id: str
    remote_ip: str = field(name="remoteIP")
    language: str | None = None
    version: Int32 = 0
    last_update_timestamp: Int64 = 0


class ProducerTable(Body, frozen=True):
    """The answer to request 328: producer group -> its connections."""

    data: dict[str, tuple[ProducerInfo, ...]] = field(default_factory=dict)


class GroupList(Body, frozen=True):
    """The answer to request 300: the groups that consume a topic."""

    group_list: tuple[str, ...] = ()


class SubscriptionGroupTable(Body, frozen=True, kw_only=True):
    """The answer to request 201: all consumer groups a broker knows, by name. [SubscriptionGroupWrapper]"""

    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
    data_version: DataVersion = DataVersion()
    forbidden_table: dict[str, dict[str, Int32]] | None = None


class GroupRequest(Header, frozen=True):
    """Request 352 GET_SUBSCRIPTIONGROUP_CONFIG (of 5.x): the configuration of one group."""

    group: str


class SubscriptionGroups(Body, frozen=True):
    """Request 225 (of 5.x): several groups at once."""

    group_config_list: tuple[SubscriptionGroupConfig, ...] = ()


class DeleteSubscriptionGroupRequest(Header, frozen=True, kw_only=True):
    """Request 207. In 4.9 the field is named `removeOffset`, in 5.x `cleanOffset`."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None

    @property
    def removes_offsets(self) -> bool:
        return bool(self.remove_offset or self.clean_offset)
