"""Message traces: what producers and consumers report about single messages, as text in the trace topic.

Fields of an entry are separated by \\x01, entries end with \\x02; the first field is the kind. Entries of a kind or
length unknown here are passed over: newer clients may add some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from downrange.model.message import Message

_FIELD: Final = "\x01"
_ENTRY: Final = "\x02"
_ABSENT: Final = "null"
_NORMAL: Final = 0
_DELAYED: Final = 3


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One report: a send, or one delivery of the message to a consumer."""

    kind: str
    group: str
    client_host: str
    timestamp: int
    cost_millis: int | None
    success: bool | None
    """None while a delivery has begun and not ended."""
    retry_times: int | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    fields: tuple[str, ...]
    host: str


def events_of(message_id: str, reports: Iterable[tuple[str, str]]) -> list[TraceEvent]:
    """What `reports` (body of a trace message, host it came from) say about one message, oldest first."""
    entries = [_Entry(fields, host) for body, host in reports for fields in _split(body)]
    ends = {(entry.fields[1], entry.fields[2]): entry.fields for entry in entries if _is(entry, "SubAfter", 5)}
    events = []
    for entry in entries:
        fields = entry.fields
        if _is(entry, "Pub", 13) and fields[5] == message_id:
            success = fields[12] if len(fields) == 13 else fields[13]
            events.append(
                TraceEvent("Pub", fields[3], entry.host, _number(fields[1]), _number(fields[10]), success == "true")
            )
        elif _is(entry, "SubBefore", 8) and fields[5] == message_id:
            end = ends.get((fields[4], message_id))
            events.append(
                TraceEvent(
                    "Sub",
                    fields[3],
                    entry.host,
                    _number(fields[1]),
                    _number(end[3]) if end else None,
                    end[4] == "true" if end else None,
                    _number(fields[6]),
                )
            )
    return sorted(events, key=lambda event: event.timestamp)


def encode_pub(
    *,
    timestamp: int,
    region_id: str,
    group: str,
    message: Message,
    message_id: str,
    store_host: str,
    cost_millis: int,
    offset_message_id: str,
) -> str:
    """The entry of one message that was sent."""
    fields = (
        "Pub",
        str(timestamp),
        region_id,
        group,
        message.topic,
        message_id,
        message.tags or _ABSENT,
        message.keys or _ABSENT,
        store_host,
        str(len(message.body)),
        str(cost_millis),
        str(_DELAYED if message.delay_level else _NORMAL),
        offset_message_id,
        "true",
    )
    return _FIELD.join(fields) + _ENTRY


def _split(body: str) -> Iterator[tuple[str, ...]]:
    for text in body.split(_ENTRY):
        if text:
            yield tuple(text.split(_FIELD))


def _is(entry: _Entry, kind: str, at_least: int) -> bool:
    return entry.fields[0] == kind and len(entry.fields) >= at_least


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
