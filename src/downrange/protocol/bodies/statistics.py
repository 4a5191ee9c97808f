"""Offsets and rates of topics and groups."""

from __future__ import annotations

from msgspec import field

from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int64


class TopicOffset(Body, frozen=True, kw_only=True):
    """The offset range of a queue; `last_update_timestamp` is the store time of its newest message, 0 when empty."""

    min_offset: Int64
    max_offset: Int64
    last_update_timestamp: Int64 = 0


class TopicStats(Body, frozen=True, kw_only=True):
    """The answer to request 202. [TopicStatsTable]"""

    offset_table: dict[MessageQueue, TopicOffset] = field(default_factory=dict)
    topic_put_tps: float | None = None


class GetConsumeStatsRequest(Header, frozen=True):
    """Request 208: the progress of a group in one topic, or in all."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class OffsetWrapper(Body, frozen=True, kw_only=True):
    """The progress of a group in a queue; `last_timestamp` is the store time of the last message it consumed."""

    broker_offset: Int64
    consumer_offset: Int64
    last_timestamp: Int64 = 0
    pull_offset: Int64 | None = None

    @property
    def behind(self) -> int:
        return self.broker_offset - self.consumer_offset


class ConsumeStats(Body, frozen=True, kw_only=True):
    """The answer to request 208."""

    offset_table: dict[MessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0


class GetBrokerConsumeStatsRequest(Header, frozen=True):
    """Request 317: the progress of all groups of a broker."""

    is_order: bool


class ConsumeStatsList(Body, frozen=True, kw_only=True):
    """The answer to request 317: every group of a broker with its statistics by topic."""

    broker_addr: str | None = None
    consume_stats_list: tuple[dict[str, tuple[ConsumeStats, ...]], ...] = ()
    total_diff: Int64 = 0


class ConsumeTimeSpanRequest(Header, frozen=True):
    """Request 303 QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class QueueTimeSpan(Body, frozen=True, kw_only=True):
    """Store times of the oldest, the newest and the last consumed message of a queue. [QueueTimeSpan]"""

    message_queue: MessageQueue
    min_time_stamp: Int64
    max_time_stamp: Int64
    consume_time_stamp: Int64
    delay_time: Int64 = 0


class ConsumeTimeSpans(Body, frozen=True):
    """The answer to request 303."""

    consume_time_span_set: tuple[QueueTimeSpan, ...] = ()


class ViewBrokerStatsRequest(Header, frozen=True):
    """Request 315: one counter, such as TOPIC_PUT_NUMS of a topic."""

    stats_name: str
    stats_key: str


class StatsItem(Body, frozen=True, kw_only=True):
    """A counter over one span of time: total, per second, average per call."""

    sum: Int64 = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body, frozen=True, kw_only=True):
    """The answer to request 315."""

    stats_minute: StatsItem = StatsItem()
    stats_hour: StatsItem = StatsItem()
    stats_day: StatsItem = StatsItem()
