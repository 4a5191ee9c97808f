"""Timer messages: how many wait (61), and recalling one (370). The checkpoint (60) is no JSON: seven longs."""

from __future__ import annotations

from msgspec import field

from downrange.protocol.bodies.body import Body
from downrange.protocol.bodies.data_version import DataVersion
from downrange.protocol.bodies.fields import Header, Int64


class TimingCount(Body, frozen=True, kw_only=True):
    """The timer messages of one topic that are not due yet, and when that changed last."""

    count: Int64 = 0
    time_stamp: Int64 = 0


class TimerMetricsTable(Body, frozen=True, kw_only=True):
    """Topic -> how many timer messages are on the wheel for it."""

    data_version: DataVersion | None = None
    timing_count: dict[str, TimingCount] = field(default_factory=dict)


class RecallMessageRequest(Header, frozen=True, kw_only=True):
    """Request 370: recall a timer message that is not due yet."""

    topic: str
    recall_handle: str
    producer_group: str | None = None
    bname: str | None = None


class RecallMessageResponse(Header, frozen=True, kw_only=True):
    """The id of the message that will not be delivered."""

    msg_id: str
    msg_region: str | None = field(name="MSG_REGION", default=None)
