"""Filters that decide which messages of a queue a pull gets.

Tags are compared by their hash codes in the queue entries; the client compares the texts. An SQL92 expression is
evaluated on the properties of each record, except for records that a bit map rules out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from downrange.broker.filter_data import ConsumerFilter, ConsumerFilters
from downrange.model import properties as names
from downrange.model.sql.condition import Properties
from downrange.model.sql.expression import SqlExpression
from downrange.model.subscription import SUB_ALL, Subscription
from downrange.store.message_store import MatchesEntry
from downrange.store.queue.consume_queue_ext import ExtUnit, UnitTest
from downrange.store.queue.property_filter import PropertyFilter
from downrange.store.queue.tag_codes import TagCodes


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Two tests that a message must pass: one of its queue entry, one of its record. None: every message passes."""

    matches_entry: MatchesEntry | None = None
    matches_record: PropertyFilter | None = None

    def matches(self, tags_code: int, properties: str) -> bool:
        """Whether a waiting pull wants this message, which has just arrived."""
        if self.matches_entry is not None and not self.matches_entry(tags_code, None):
            return False
        return self.matches_record is None or self.matches_record.matches(properties)


EVERYTHING: Final = MessageFilter()


def tag_filter(subscription: Subscription) -> MessageFilter:
    """A filter by tags; if the subscription is not by tags, every message passes.

    The text decides: with `*` every message passes, with a text without any tag, such as `|| ||`, none.
    """
    if subscription.expression == SUB_ALL or subscription.class_filter_mode or not subscription.is_tag_type:
        return EVERYTHING
    return _by_codes(subscription.codes)


@lru_cache(maxsize=4096)
def _by_codes(codes: frozenset[int]) -> MessageFilter:
    return MessageFilter(TagCodes(codes))


def sql_filter(expression: SqlExpression) -> MessageFilter:
    """A filter by an expression that came with the pull itself and so has no bits in bit maps."""
    return MessageFilter(matches_record=PropertyFilter(expression.condition, expression.names))


def group_filter(known: ConsumerFilter, filters: ConsumerFilters) -> MessageFilter:
    """A filter by the expression of a group. Bit maps rule messages out; the expression decides about the others."""
    may_want, mask, born_time = filters.bloom.may_want, known.mask, known.born_time

    def matches(unit: ExtUnit) -> bool:
        return unit.store_timestamp <= born_time or may_want(unit.bitmap, mask)

    return MessageFilter(UnitTest(matches), PropertyFilter(known.expression.condition, known.expression.names))


def retry_filter(subscription: Subscription, group: str, filters: ConsumerFilters) -> MessageFilter:
    """A filter for the retry topic of a group, with the group's expression for the topic each message came from."""

    def condition(properties: Properties) -> bool | None:
        known = filters.get(properties(names.RETRY_TOPIC) or "", group)
        return known is None or known.expression.condition(properties)

    return MessageFilter(tag_filter(subscription).matches_entry, PropertyFilter(condition))
