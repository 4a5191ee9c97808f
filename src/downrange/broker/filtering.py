"""Which messages of a queue a subscription wants, as far as the broker can tell without decoding them.

Tags are compared by their hash codes; the client compares the texts. (SQL92 expressions: see sql_filter.py once they
are evaluated here.)
"""

from __future__ import annotations

from downrange.model.subscription import Subscription
from downrange.store.consume_queue_ext import ExtUnit
from downrange.store.message_store import MatchesEntry


def entry_filter(subscription: Subscription) -> MatchesEntry | None:
    """A test of queue entries by tag hash; None when every message matches."""
    codes = subscription.codes
    if not codes or subscription.class_filter_mode or not subscription.is_tag_type:
        return None

    def matches(tags_code: int | None, unit: ExtUnit | None) -> bool:
        return tags_code is None or _signed(tags_code) in codes

    return matches


def matches_tags(subscription: Subscription, tags_code: int) -> bool:
    """Would a message with this tag hash wake a pull that waits?"""
    codes = subscription.codes
    return not codes or subscription.class_filter_mode or not subscription.is_tag_type or _signed(tags_code) in codes


def _signed(tags_code: int) -> int:
    """The low 32 bits as Java reads them: a delay queue keeps delivery times in the place of the hash."""
    low = tags_code & 0xFFFFFFFF
    return low - 0x1_0000_0000 if low & 0x8000_0000 else low
