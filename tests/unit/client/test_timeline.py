"""The events of one message in the order of time."""

from __future__ import annotations

from dataclasses import replace

from downrange.client.admin.timeline import EventKind, GroupCopies, timeline
from downrange.client.trace import MessageType
from downrange.client.trace_reader import MessageTrace, TracedDelivery, TracedSend, TracedTransaction
from downrange.model.message import PhysicalOffset, QueueOffset, StoredMessage
from downrange.model.message_id import HostPort

BROKER = HostPort("10.0.0.1", 10911)
MESSAGE = StoredMessage(
    topic="orders",
    queue_id=1,
    queue_offset=QueueOffset(17),
    physical_offset=PhysicalOffset(0),
    body=b"",
    properties_text="",
    sys_flag=0,
    flag=0,
    born_timestamp=99,
    born_host=HostPort("10.0.0.9", 1),
    store_timestamp=100,
    store_host=BROKER,
    reconsume_times=0,
    prepared_transaction_offset=0,
    body_crc=0,
    store_size=0,
)
SEND = TracedSend(
    timestamp=98,
    group="shop",
    client_host="10.0.0.9",
    topic="orders",
    tags=None,
    keys=None,
    store_host="10.0.0.1:10911",
    body_length=0,
    cost_millis=4,
    message_type=MessageType.NORMAL,
    offset_message_id=None,
    success=True,
    region_id=None,
)


def test_traces_and_stored_copies_make_one_line_of_events() -> None:
    trace = MessageTrace(
        "id",
        [SEND],
        [TracedTransaction(99, "shop", "10.0.0.9", None, "COMMIT_MESSAGE", from_check=True)],
        [
            TracedDelivery(102, "billing", "10.0.0.7", 0, 5, success=False),
            TracedDelivery(202, "billing", "10.0.0.8", 1),
        ],
        [],
    )
    retry = replace(MESSAGE, topic="%RETRY%billing", store_timestamp=200, reconsume_times=1)
    dead = replace(MESSAGE, topic="%DLQ%billing", store_timestamp=300, reconsume_times=2)
    events = timeline([MESSAGE], {"billing": GroupCopies((retry,), (dead,)), "audit": GroupCopies()}, trace)
    assert [(one.at, one.lane, one.kind, one.millis, one.success, one.number) for one in events] == [
        (98, "producer shop", EventKind.SENT, 4, True, None),
        (99, "producer shop", EventKind.TRANSACTION, None, None, None),
        (100, "broker 10.0.0.1:10911", EventKind.STORED, None, None, None),
        (102, "group billing", EventKind.DELIVERED, 5, False, 0),
        (200, "group billing", EventKind.RETRIED, None, None, 1),
        (202, "group billing", EventKind.DELIVERED, None, None, 1),
        (300, "group billing", EventKind.GIVEN_UP, None, None, 2),
    ]
    assert events[1].detail == "COMMIT_MESSAGE after a check"
    assert events[2].detail == "orders queue 1 offset 17"


def test_without_a_trace_what_brokers_stored_is_left() -> None:
    assert [one.kind for one in timeline([MESSAGE], {}, None)] == [EventKind.STORED]
