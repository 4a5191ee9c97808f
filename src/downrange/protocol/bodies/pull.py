"""Pulling messages from a queue: 11 PULL_MESSAGE and 361 LITE_PULL_MESSAGE."""

from __future__ import annotations

from enum import IntFlag

from msgspec import field

from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32, Int64


class PullSysFlag(IntFlag):
    """Bits of a pull request's sysFlag."""

    COMMIT_OFFSET = 1
    SUSPEND = 2
    SUBSCRIPTION = 4
    CLASS_FILTER = 8
    LITE_PULL = 16


class PullMessageRequest(Header, frozen=True, kw_only=True, gc=False):
    """A pull. `subscription` counts only with the SUBSCRIPTION bit, `commit_offset` only with COMMIT_OFFSET.

    The numbers that have a default are missing in pulls of some clients, which RocketMQ's brokers answer.
    `bulk` is not RocketMQ's: it asks for `max_msg_nums` messages within `maxTransferBytesOnBulkPull`. Java ignores it.
    """

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64 = 0
    suspend_timeout_millis: Int64 = 0
    subscription: str | None = None
    sub_version: Int64 = 0
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    request_source: Int32 | None = None
    proxy_forward_client_id: str | None = field(name="proxyFrowardClientId", default=None)
    bname: str | None = None
    bulk: bool | None = None


class PullMessageResponse(Header, frozen=True, kw_only=True, gc=False):
    """The answer to a pull. A Java client fails inside its callback when one of the four numbers is missing."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    offset_delta: Int64 | None = None
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None


class OffsetMovedEvent(Body, frozen=True, kw_only=True):
    """The body of the message that a broker stores in OFFSET_MOVED_EVENT when it answers PULL_OFFSET_MOVED."""

    consumer_group: str
    message_queue: MessageQueue
    offset_request: Int64
    offset_new: Int64
