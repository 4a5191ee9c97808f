"""Request and reply between clients: the broker passes a reply to the asking client."""

from __future__ import annotations

from downrange.protocol.bodies.fields import Header, Int32, Int64


class PushReplyMessageRequest(Header, frozen=True, kw_only=True):
    """Request 326, from the broker to the asking client; its body is the body of the reply. Hosts are `ip:port`."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str = ""
    reconsume_times: Int32 = 0
    unit_mode: bool = False
    born_host: str
    store_host: str
    store_timestamp: Int64
