"""How far topics and groups are, and how fast they move."""

from __future__ import annotations

from msgspec import field

from downrange.model.message import MessageQueue
from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.fields import Header, Int64


class TopicOffset(Body, frozen=True, kw_only=True):
    """The reach of one queue; `last_update_timestamp` is the store time of its newest message, 0 when empty."""

    min_offset: Int64
    max_offset: Int64
    last_update_timestamp: Int64 = 0


class TopicStats(Body, frozen=True, kw_only=True):
    """202's answer. [TopicStatsTable]"""

    offset_table: dict[MessageQueue, TopicOffset] = field(default_factory=dict)
    topic_put_tps: float | None = None


class GetConsumeStatsRequest(Header, frozen=True):
    """208: one topic of a group, or all."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class OffsetWrapper(Body, frozen=True, kw_only=True):
    """How far a group is in one queue; `last_timestamp` is the store time of the last message it consumed."""

    broker_offset: Int64
    consumer_offset: Int64
    last_timestamp: Int64 = 0
    pull_offset: Int64 | None = None

    @property
    def behind(self) -> int:
        return self.broker_offset - self.consumer_offset


class ConsumeStats(Body, frozen=True, kw_only=True):
    """208's answer."""

    offset_table: dict[MessageQueue, OffsetWrapper] = field(default_factory=dict)
    consume_tps: float = 0.0


class GetBrokerConsumeStatsRequest(Header, frozen=True):
    """317."""

    is_order: bool


class ConsumeStatsList(Body, frozen=True, kw_only=True):
    """317's answer: every group of a broker with its statistics by topic."""

    broker_addr: str | None = None
    consume_stats_list: tuple[dict[str, tuple[ConsumeStats, ...]], ...] = ()
    total_diff: Int64 = 0


class ConsumeTimeSpanRequest(Header, frozen=True):
    """303 QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class QueueTimeSpan(Body, frozen=True, kw_only=True):
    """Store times of one queue: its oldest and newest message and the last one consumed. [QueueTimeSpan]"""

    message_queue: MessageQueue
    min_time_stamp: Int64
    max_time_stamp: Int64
    consume_time_stamp: Int64
    delay_time: Int64 = 0


class ConsumeTimeSpans(Body, frozen=True):
    """303's answer."""

    consume_time_span_set: tuple[QueueTimeSpan, ...] = ()


class ViewBrokerStatsRequest(Header, frozen=True):
    """315: one counter, such as TOPIC_PUT_NUMS of a topic."""

    stats_name: str
    stats_key: str


class StatsItem(Body, frozen=True, kw_only=True):
    """A counter over one span of time: total, per second, average per call."""

    sum: Int64 = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Body, frozen=True, kw_only=True):
    """315's answer."""

    stats_minute: StatsItem = StatsItem()
    stats_hour: StatsItem = StatsItem()
    stats_day: StatsItem = StatsItem()
