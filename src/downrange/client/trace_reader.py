"""The traces of one message: its sending, the end of its transaction, and its deliveries to consumers.

Reads the entries of 4.x and 5.x clients (client/trace.py has their fields). Entries of a kind or length unknown here
are passed over: newer clients may add some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from downrange.client.trace import ABSENT, ENTRY_END, FIELD_SEPARATOR, ConsumeCode, MessageType

_SHORTEST: Final = {"Pub": 13, "SubBefore": 8, "SubAfter": 6, "EndTransaction": 13, "Recall": 7}


@dataclass(frozen=True, slots=True)
class TracedSend:
    """One send that was acknowledged. `store_host` is the broker's address."""

    timestamp: int
    group: str
    client_host: str
    topic: str
    tags: str | None
    keys: str | None
    store_host: str
    body_length: int
    cost_millis: int
    message_type: MessageType | int
    offset_message_id: str | None
    success: bool
    region_id: str | None


@dataclass(frozen=True, slots=True)
class TracedTransaction:
    """The end of a transaction as a producer told it; `from_check` when the broker had asked."""

    timestamp: int
    group: str
    client_host: str
    transaction_id: str | None
    state: str
    from_check: bool


@dataclass(frozen=True, slots=True)
class TracedDelivery:
    """One call of a consumer's callback. `success` is None when no trace says that the call has ended."""

    timestamp: int
    group: str
    client_host: str
    retry_times: int | None
    cost_millis: int | None = None
    success: bool | None = None
    code: ConsumeCode | int | None = None


@dataclass(frozen=True, slots=True)
class TracedRecall:
    """A delayed message was called back before it was due (5.x)."""

    timestamp: int
    group: str
    client_host: str
    success: bool


@dataclass(frozen=True, slots=True)
class MessageTrace:
    """The life of one message as its clients reported it, each part oldest first."""

    message_id: str
    sends: Sequence[TracedSend]
    transactions: Sequence[TracedTransaction]
    deliveries: Sequence[TracedDelivery]
    recalls: Sequence[TracedRecall]

    @property
    def is_empty(self) -> bool:
        return not (self.sends or self.transactions or self.deliveries or self.recalls)

    @property
    def groups(self) -> dict[str, list[TracedDelivery]]:
        """The deliveries by consumer group, in the order the groups first got the message."""
        found: dict[str, list[TracedDelivery]] = {}
        for delivery in self.deliveries:
            found.setdefault(delivery.group, []).append(delivery)
        return found


T = TypeVar("T", TracedSend, TracedTransaction, TracedDelivery, TracedRecall)
N = TypeVar("N", MessageType, ConsumeCode)


class _Entry:
    """The fields of one entry by position, and the host it came from."""

    def __init__(self, fields: Sequence[str], host: str) -> None:
        self.kind = fields[0]
        self.fields = fields
        self.host = host

    def text(self, at: int) -> str | None:
        value = self.fields[at] if at < len(self.fields) else ""
        return value if value and value != ABSENT else None

    def word(self, at: int) -> str:
        return self.text(at) or ""

    def number(self, at: int) -> int:
        text = self.word(at)
        return int(text) if text.isdecimal() else 0

    def flag(self, at: int) -> bool:
        return self.word(at).lower() == "true"


def trace_of(message_id: str, reports: Iterable[tuple[str, str]]) -> MessageTrace:
    """The trace of one message out of `reports`: pairs of a trace message's body and the host that sent it."""
    entries = list(_entries(reports))
    return MessageTrace(
        message_id,
        _sorted(_send(entry) for entry in entries if entry.kind == "Pub" and entry.fields[5] == message_id),
        _sorted(
            _transaction(entry) for entry in entries if entry.kind == "EndTransaction" and entry.fields[5] == message_id
        ),
        _sorted(_deliveries(message_id, entries)),
        _sorted(_recall(entry) for entry in entries if entry.kind == "Recall" and entry.fields[5] == message_id),
    )


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry by itself. A delivery is two events of one request: its begin has no outcome, its end has one."""

    message_id: str
    request_id: str | None
    what: TracedSend | TracedTransaction | TracedDelivery | TracedRecall


def events_of(reports: Iterable[tuple[str, str]]) -> Iterator[TraceEvent]:
    """All entries of `reports`: pairs of a trace message's body and the host that sent it. Nothing is joined."""
    for entry in _entries(reports):
        if entry.kind == "Pub":
            yield TraceEvent(entry.fields[5], None, _send(entry))
        elif entry.kind == "EndTransaction":
            yield TraceEvent(entry.fields[5], None, _transaction(entry))
        elif entry.kind == "Recall":
            yield TraceEvent(entry.fields[5], None, _recall(entry))
        elif entry.kind == "SubBefore":
            yield TraceEvent(entry.fields[5], entry.fields[4], _begun(entry))
        else:  # old clients do not say when a call ended, nor for which group
            begin = entry.number(7) - entry.number(3) if len(entry.fields) >= 9 else 0
            yield TraceEvent(
                entry.fields[2],
                entry.fields[1],
                TracedDelivery(begin, entry.word(8), entry.host, None, *_end(entry)),
            )


def _sorted(found: Iterable[T]) -> list[T]:
    return sorted(found, key=lambda one: one.timestamp)


def _entries(reports: Iterable[tuple[str, str]]) -> Iterator[_Entry]:
    """Every entry once: a broker may list one trace message twice."""
    seen = set()
    for body, host in reports:
        for text in body.split(ENTRY_END):
            fields = text.split(FIELD_SEPARATOR)
            if len(fields) >= _SHORTEST.get(fields[0], len(fields) + 1) and (text, host) not in seen:
                seen.add((text, host))
                yield _Entry(fields, host)


def _send(entry: _Entry) -> TracedSend:
    has_offset_id = len(entry.fields) > 13
    return TracedSend(
        timestamp=entry.number(1),
        group=entry.word(3),
        client_host=entry.text(14) or entry.host,
        topic=entry.word(4),
        tags=entry.text(6),
        keys=entry.text(7),
        store_host=entry.word(8),
        body_length=entry.number(9),
        cost_millis=entry.number(10),
        message_type=_known(MessageType, entry.number(11)),
        offset_message_id=entry.text(12) if has_offset_id else None,
        success=entry.flag(13 if has_offset_id else 12),
        region_id=entry.text(2),
    )


def _transaction(entry: _Entry) -> TracedTransaction:
    return TracedTransaction(entry.number(1), entry.word(3), entry.host, entry.text(10), entry.word(11), entry.flag(12))


def _recall(entry: _Entry) -> TracedRecall:
    return TracedRecall(entry.number(1), entry.word(3), entry.host, entry.flag(6))


def _begun(entry: _Entry) -> TracedDelivery:
    return TracedDelivery(entry.number(1), entry.word(3), entry.host, entry.number(6))


def _deliveries(message_id: str, entries: Sequence[_Entry]) -> Iterator[TracedDelivery]:
    ends = {entry.fields[1]: entry for entry in entries if entry.kind == "SubAfter" and entry.fields[2] == message_id}
    for entry in entries:
        if entry.kind == "SubBefore" and entry.fields[5] == message_id:
            begun = _begun(entry)
            end = ends.pop(entry.fields[4], None)
            if end is not None:
                cost, success, code = _end(end)
                begun = replace(begun, cost_millis=cost, success=success, code=code)
            yield begun
    for end in ends.values():  # calls whose begin was not traced, or is not stored yet
        if len(end.fields) >= 9:
            yield TracedDelivery(end.number(7) - end.number(3), end.word(8), end.host, None, *_end(end))


def _end(entry: _Entry) -> tuple[int, bool, ConsumeCode | int | None]:
    code = _known(ConsumeCode, entry.number(6)) if len(entry.fields) > 6 else None
    return entry.number(3), entry.flag(4), code


def _known(kind: type[N], number: int) -> N | int:
    try:
        return kind(number)
    except ValueError:
        return number
