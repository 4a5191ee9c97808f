"""The life of one message as events in the order of time: from traces, and from what brokers stored of it.

Traces are there only if clients write them. What brokers stored is always there: the message, its retries and its dead
letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from downrange.client.trace_reader import MessageTrace
from downrange.model.message import StoredMessage
from downrange.model.text import Text, as_is


class EventKind(StrEnum):
    SENT = "sent"
    STORED = "stored"
    TRANSACTION = "transaction ended"
    RECALLED = "recalled"
    DELIVERED = "delivered"
    RETRIED = "retry stored"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: when it began, who did it, and how long it took. `success` is None where no end is known.

    `lane` is the actor: `producer shop`, `broker 10.0.0.1:10911` or `group billing`. `number` counts the deliveries
    of a message to a group, the first is 0.
    """

    at: int
    lane: Text
    kind: EventKind
    detail: Text = Text("")
    millis: int | None = None
    success: bool | None = None
    number: int | None = None


@dataclass(frozen=True, slots=True)
class GroupCopies:
    """What brokers stored of a message for one group: its retries and its dead letters."""

    retries: tuple[StoredMessage, ...] = ()
    dead: tuple[StoredMessage, ...] = ()


def timeline(
    stored: Iterable[StoredMessage], copies: Mapping[str, GroupCopies], trace: MessageTrace | None
) -> tuple[Event, ...]:
    """All events of a message, oldest first; `stored` has more than one when the producer sent again."""
    events = [_stored(one, Text("broker {broker}", broker=one.store_host), EventKind.STORED) for one in stored]
    for group, found in copies.items():
        lane = Text("group {group}", group=group)
        events += [_stored(one, lane, EventKind.RETRIED) for one in found.retries]
        events += [_stored(one, lane, EventKind.GIVEN_UP) for one in found.dead]
    if trace is not None:
        events += _traced(trace)
    order = list(EventKind)
    return tuple(sorted(events, key=lambda one: (one.at, order.index(one.kind), one.lane)))


def _stored(message: StoredMessage, lane: Text, kind: EventKind) -> Event:
    place = Text(
        "{topic} queue {queue} offset {offset}",
        topic=message.topic,
        queue=message.queue_id,
        offset=message.queue_offset,
    )
    number = None if kind is EventKind.STORED else message.reconsume_times
    return Event(message.store_timestamp, lane, kind, place, number=number)


def _producer(group: str) -> Text:
    return Text("producer {group}", group=group)


def _traced(trace: MessageTrace) -> Iterator[Event]:
    for send in trace.sends:
        detail = Text("from {client} to {broker}", client=send.client_host, broker=send.store_host)
        yield Event(send.timestamp, _producer(send.group), EventKind.SENT, detail, send.cost_millis, send.success)
    for end in trace.transactions:
        detail = Text("{state} after a check", state=end.state) if end.from_check else as_is(str(end.state))
        yield Event(end.timestamp, _producer(end.group), EventKind.TRANSACTION, detail)
    for recall in trace.recalls:
        yield Event(recall.timestamp, _producer(recall.group), EventKind.RECALLED, success=recall.success)
    for delivery in trace.deliveries:
        yield Event(
            delivery.timestamp,
            Text("group {group}", group=delivery.group),
            EventKind.DELIVERED,
            Text("at {client}", client=delivery.client_host),
            delivery.cost_millis,
            delivery.success,
            delivery.retry_times,
        )
