"""Requests for single messages and for entries of a consume queue."""

from __future__ import annotations

from msgspec import field

from downrange.model.subscription import Subscription
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int32, Int64


class ViewMessageRequest(Header, frozen=True):
    """Request 33: the message at `offset` of the commit log."""

    offset: Int64
    topic: str | None = None


class QueryMessageRequest(Header, frozen=True, kw_only=True):
    """Request 12: messages by key, or by unique id when `unique_key_query`."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    unique_key_query: bool = field(name="_UNIQUE_KEY_QUERY", default=False)


class QueryMessageResponse(Header, frozen=True, kw_only=True):
    """The answer to request 12: time and offset of the last index entry. Zeros are sent with QUERY_NOT_FOUND."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


class QueryConsumeQueueRequest(Header, frozen=True, kw_only=True):
    """Request 321: `count` entries of a consume queue, from the entry `index` on."""

    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class ConsumeQueueData(Body, frozen=True, kw_only=True):
    """One entry of a consume queue; `eval` says whether it passes the filter of the group."""

    physic_offset: Int64
    physic_size: Int32
    tags_code: Int64
    eval: bool = False
    extend_data_json: str | None = None
    bit_map: str | None = None
    msg: str | None = None


class ConsumeQueueEntries(Body, frozen=True, kw_only=True):
    """The answer to request 321. [QueryConsumeQueueResponseBody]"""

    min_queue_index: Int64
    max_queue_index: Int64
    queue_data: tuple[ConsumeQueueData, ...] = ()
    subscription_data: Subscription | None = None
    filter_data: str | None = None
