"""Requests of operators to running consumers; the broker relays most of them to the client."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from downrange.model.message import MessageQueue
from downrange.model.subscription import Subscription
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32, Int64


class GetConsumerRunningInfoRequest(Header, frozen=True, kw_only=True):
    """Request 307: the state of a running consumer."""

    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class ProcessQueueInfo(Body, frozen=True, kw_only=True):
    """One queue inside a running consumer."""

    commit_offset: Int64 = 0
    cached_msg_min_offset: Int64 = 0
    cached_msg_max_offset: Int64 = 0
    cached_msg_count: Int32 = 0
    cached_msg_size_in_mib: Int32 = field(name="cachedMsgSizeInMiB", default=0)
    transaction_msg_min_offset: Int64 = 0
    transaction_msg_max_offset: Int64 = 0
    transaction_msg_count: Int32 = 0
    locked: bool = False
    try_unlock_times: Int64 = 0
    last_lock_timestamp: Int64 = 0
    dropped: bool = field(name="droped", default=False)
    last_pull_timestamp: Int64 = 0
    last_consume_timestamp: Int64 = 0


class PopProcessQueueInfo(Body, frozen=True, kw_only=True):
    """One queue from which a 5.x consumer pops."""

    wait_ack_count: Int32 = 0
    dropped: bool = field(name="droped", default=False)
    last_pop_timestamp: Int64 = 0


class ConsumeStatus(Body, frozen=True, kw_only=True):
    """The consumption of one topic: times in milliseconds, rates per second, failures of the last hour."""

    pull_rt: float = field(name="pullRT", default=0.0)
    pull_tps: float = field(name="pullTPS", default=0.0)
    consume_rt: float = field(name="consumeRT", default=0.0)
    consume_ok_tps: float = field(name="consumeOKTPS", default=0.0)
    consume_failed_tps: float = field(name="consumeFailedTPS", default=0.0)
    consume_failed_msgs: Int64 = 0


class ConsumerRunningInfo(Body, frozen=True, kw_only=True):
    """The answer to request 307. Tools need the properties PROP_CONSUME_TYPE and PROP_CONSUMER_START_TIMESTAMP."""

    properties: dict[str, str | int | float | bool] = field(default_factory=dict)
    subscription_set: tuple[Subscription, ...] = ()
    mq_table: dict[MessageQueue, ProcessQueueInfo] = field(default_factory=dict)
    mq_pop_table: dict[MessageQueue, PopProcessQueueInfo] | None = None
    status_table: dict[str, ConsumeStatus] = field(default_factory=dict)
    user_consumer_info: dict[str, str] | None = None
    jstack: str | None = None


class ConsumeMessageDirectlyRequest(Header, frozen=True, kw_only=True):
    """Request 309: hand one message to the listener of one client."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None


class ConsumeResult(StrEnum):
    """The result of the listener."""

    SUCCESS = "CR_SUCCESS"
    LATER = "CR_LATER"
    ROLLBACK = "CR_ROLLBACK"
    COMMIT = "CR_COMMIT"
    THROW_EXCEPTION = "CR_THROW_EXCEPTION"
    RETURN_NULL = "CR_RETURN_NULL"


class ConsumeMessageDirectlyResult(Body, frozen=True, kw_only=True):
    """The answer to request 309."""

    consume_result: str | None = None
    remark: str | None = None
    spent_time_mills: Int64 = 0
    order: bool = False
    auto_commit: bool = True


class ResetOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 222 from the tool to the broker, 220 from the broker to consumers.

    `timestamp` -1 means the end of the queue; `queue_id` (5.x) -1 means all queues.
    """

    topic: str
    group: str
    timestamp: Int64
    is_force: bool = False
    queue_id: Int32 | None = None
    offset: Int64 | None = None


class QueueOffsets(Body, frozen=True):
    """The body of request 220 and the answer to 222: the new offset of each queue. [ResetOffsetBody]"""

    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


class QueueOffset(Body, frozen=True, kw_only=True):
    """One row of `QueueOffsetList`."""

    topic: str
    broker_name: str
    queue_id: Int32
    offset: Int64


class QueueOffsetList(Body, frozen=True):
    """The body of request 220 for clients written in C++. [ResetOffsetBodyForC]"""

    offset_table: tuple[QueueOffset, ...] = ()


class GetConsumerStatusRequest(Header, frozen=True, kw_only=True):
    """Request 223 from the tool, where `client_addr` is a client id; 221 from the broker to consumers."""

    topic: str
    group: str
    client_addr: str | None = None


class ConsumerStatus(Body, frozen=True, kw_only=True):
    """Offsets in the memory of consumers: 221 fills `message_queue_table`, 223 `consumer_table` by client id."""

    message_queue_table: dict[MessageQueue, Int64] = field(default_factory=dict)
    consumer_table: dict[str, dict[MessageQueue, Int64]] = field(default_factory=dict)
