"""Pop retry topics of a group that pulls: messages that came again while the group popped wait there.

A group that an operator moved from POP to PULL pulls them, too, until it pops again. [RebalanceImpl]
"""

from __future__ import annotations

from collections.abc import Collection

from downrange.client.consumer.queue_ownership import QueueOwnership
from downrange.client.consumer.subscriptions import Subscriptions
from downrange.model.subscription import SUB_ALL
from downrange.model.topics import RETRY_PREFIX, pop_retry_topic


async def follow_pop_retries(
    group: str, subscriptions: Subscriptions, held: QueueOwnership, popped: Collection[str]
) -> Collection[str]:
    """Subscribe to the pop retry topics of all topics that are not in `popped`, and to those of no others.

    Returns the topics that are new, whose queues are to be shared out. Topics that do not exist are left alone.
    """
    new = []
    for topic in [topic for topic in subscriptions.table if not topic.startswith(RETRY_PREFIX)]:
        for version in (1, 2):
            retries = pop_retry_topic(group, topic, version=version)
            if topic in popped:
                if subscriptions.table.pop(retries, None) is not None:
                    await held.release_topic(retries)
            elif retries not in subscriptions.table and await subscriptions.exists(retries):
                subscriptions.table[retries] = subscriptions.new(retries, SUB_ALL, None)
                new.append(retries)
    return new
