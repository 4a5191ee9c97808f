"""Committed offsets of groups, and offset ranges of queues."""

from __future__ import annotations

from msgspec import field

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header, Int32, Int64


class QueryConsumerOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 14: the committed offset of a group in a queue."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None
    bname: str | None = None


class UpdateConsumerOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 15: commit an offset."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64
    bname: str | None = None


class GetMaxOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 30: the offset that the next message will get."""

    topic: str
    queue_id: Int32
    committed: bool | None = None
    bname: str | None = None


class QueueRequest(Header, frozen=True, kw_only=True):
    """Requests 31 GET_MIN_OFFSET and 32 GET_EARLIEST_MSG_STORETIME."""

    topic: str
    queue_id: Int32
    bname: str | None = None


class SearchOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 29: the offset of the message stored at a given time."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None
    bname: str | None = None


class OffsetResponse(Header, frozen=True):
    """The answer to requests 14, 29, 30 and 31."""

    offset: Int64


class EarliestStoreTimeResponse(Header, frozen=True):
    """The answer to request 32; -1 when the queue is empty."""

    timestamp: Int64


class ConsumerOffsets(Body, frozen=True, kw_only=True):
    """Request 43, for slaves: `topic@group` -> queue id -> committed offset."""

    offset_table: dict[str, dict[int, int]] = field(default_factory=dict)
    data_version: DataVersion | None = None


class DelayOffsets(Body, frozen=True, kw_only=True):
    """Request 45, for slaves: delay level -> offset of the delay queue delivered so far."""

    offset_table: dict[int, int] = field(default_factory=dict)
    data_version: DataVersion | None = None


class QueryCorrectionOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 308: the offsets of groups that are behind `compare_group`."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class CorrectionOffsets(Body, frozen=True):
    """The answer to request 308: queue id -> smallest committed offset."""

    correction_offsets: dict[int, int] = field(default_factory=dict)


class CloneGroupOffsetRequest(Header, frozen=True, kw_only=True):
    """Request 314: copy the offsets of `src_group` to `dest_group`."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False
