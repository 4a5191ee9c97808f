"""Filters of a query that let us read less: by topic, broker, queue, queue offset, store time and tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from downrange.model.message import MessageQueue
from downrange.spark.planner import QueueRange

_MOST: Final = 2**62
_EVERYTHING: Final = range(-_MOST, _MOST)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """The part of a topic that the filters of a query leave to read. Messages outside of it cannot match."""

    chosen: dict[str, frozenset[Any]] = field(default_factory=dict)
    queue_offsets: range = _EVERYTHING
    millis: range = _EVERYTHING

    @classmethod
    def by(cls, filters: Iterable[Filter]) -> Narrowed:
        found = cls()
        for one in filters:
            found = found.narrowed(one)
        return found

    def narrowed(self, one: Filter) -> Narrowed:
        column: tuple[str, ...] = getattr(one, "attribute", ())
        if len(column) != 1:
            return self
        name = column[0]
        if name in ("topic", "broker", "queue_id", "tags"):
            return self._chosen(name, one)
        if name == "queue_offset":
            return replace(self, queue_offsets=_cut(self.queue_offsets, one, int))
        if name == "store_time":
            return replace(self, millis=_cut(self.millis, one, _millis))
        return self

    def _chosen(self, name: str, one: Filter) -> Narrowed:
        match one:
            case EqualTo(value=value) | EqualNullSafe(value=value) if value is not None:
                values = frozenset({value})
            case In(value=several):
                values = frozenset(value for value in several if value is not None)
            case _:
                return self
        if name in self.chosen:
            values &= self.chosen[name]
        return replace(self, chosen={**self.chosen, name: values})

    @property
    def store_time(self) -> range | None:
        return None if self.millis == _EVERYTHING else self.millis

    def has_queue(self, queue: MessageQueue) -> bool:
        return all(
            value in self.chosen[name]
            for name, value in (("topic", queue.topic), ("broker", queue.broker_name), ("queue_id", queue.queue_id))
            if name in self.chosen
        )

    def within(self, one: QueueRange) -> QueueRange:
        return one._replace(start=max(one.start, self.queue_offsets.start), stop=min(one.stop, self.queue_offsets.stop))

    def tags_of(self, wanted: frozenset[str]) -> frozenset[str]:
        """The tags to keep, given those that the option `tags` asks for; empty means all tags."""
        if "tags" not in self.chosen:
            return wanted
        found = self.chosen["tags"] & wanted if wanted else self.chosen["tags"]
        # No tag is left: then a text that no tag can be, since it separates properties.
        return found or frozenset({"\x02"})


def _cut(known: range, one: Filter, number: Callable[[Any], int]) -> range:
    """`known` without the values that the comparison rules out."""
    low, high = known.start, known.stop
    match one:
        case EqualTo(value=value) | EqualNullSafe(value=value) if value is not None:
            low, high = max(low, number(value)), min(high, number(value) + 1)
        case GreaterThan(value=value) | GreaterThanOrEqual(value=value):
            low = max(low, number(value))  # one value too many is harmless: Spark compares again
        case LessThan(value=value) | LessThanOrEqual(value=value):
            high = min(high, number(value) + 1)
    return range(low, high)


def _millis(moment: datetime) -> int:
    """Milliseconds of a time; Spark passes a time without a zone as UTC."""
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
