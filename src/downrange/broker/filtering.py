"""Which messages of a queue a pull wants, as far as the broker can tell.

Tags are compared by their hash codes, in the queue entries; the client compares the texts. An SQL92 expression is
asked about the properties of each record; bit maps, where there are any, spare it the records it surely does not want.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from downrange.broker.filter_data import ConsumerFilter, ConsumerFilters
from downrange.broker.sql.expression import SqlExpression
from downrange.model import properties as names
from downrange.model.properties import find_property
from downrange.model.record import properties_of
from downrange.model.subscription import Subscription
from downrange.store.consume_queue_ext import ExtUnit
from downrange.store.message_store import MatchesEntry

MatchesProperties = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Two tests a message must pass: one of its queue entry, one of the text of its properties. None: all pass."""

    matches_entry: MatchesEntry | None = None
    matches_properties: MatchesProperties | None = None

    def matches_record(self, record: memoryview | bytes) -> bool:
        return self.matches_properties is None or self.matches_properties(properties_of(record))

    def matches(self, tags_code: int, properties: str) -> bool:
        """Does a pull that waits want this message, which has just arrived?"""
        if self.matches_entry is not None and not self.matches_entry(tags_code, None):
            return False
        return self.matches_properties is None or self.matches_properties(properties)


EVERYTHING: Final = MessageFilter()


def tag_filter(subscription: Subscription) -> MessageFilter:
    """By tags; a subscription to something else lets everything through."""
    matches = entry_filter(subscription)
    return EVERYTHING if matches is None else MessageFilter(matches)


def entry_filter(subscription: Subscription) -> MatchesEntry | None:
    """A test of queue entries by tag hash; None when every message matches."""
    codes = subscription.codes
    if not codes or subscription.class_filter_mode or not subscription.is_tag_type:
        return None

    def matches(tags_code: int | None, unit: ExtUnit | None) -> bool:
        return tags_code is None or _signed(tags_code) in codes

    return matches


def sql_filter(expression: SqlExpression) -> MessageFilter:
    """By an expression that came with the pull itself, and has no bits in any bit map."""
    return MessageFilter(matches_properties=partial(_matches, expression))


def group_filter(known: ConsumerFilter, filters: ConsumerFilters) -> MessageFilter:
    """By the expression of a group: bit map first, then the expression, since a bit map only tells who may want it."""
    may_want, mask, born_time = filters.bloom.may_want, known.mask, known.born_time

    def matches(tags_code: int | None, unit: ExtUnit | None) -> bool:
        return unit is None or unit.store_timestamp <= born_time or may_want(unit.bitmap, mask)

    return MessageFilter(matches, partial(_matches, known.expression))


def retry_filter(subscription: Subscription, group: str, filters: ConsumerFilters) -> MessageFilter:
    """For the retry topic of a group: also by the group's expression for the topic each message came from."""

    def matches(properties: str) -> bool:
        known = filters.get(find_property(properties, names.RETRY_TOPIC) or "", group)
        return known is None or _matches(known.expression, properties)

    return MessageFilter(entry_filter(subscription), matches)


def _matches(expression: SqlExpression, properties: str) -> bool:
    return expression.matches(partial(find_property, properties))


def _signed(tags_code: int) -> int:
    """The low 32 bits as Java reads them: a delay queue keeps delivery times in the place of the hash."""
    low = tags_code & 0xFFFFFFFF
    return low - 0x1_0000_0000 if low & 0x8000_0000 else low
