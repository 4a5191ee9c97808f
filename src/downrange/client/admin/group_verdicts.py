"""Whether the members of a group fit together, in the words of mqadmin's `consumerStatus`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from downrange.model.message import MessageQueue
from downrange.model.topics import RETRY_PREFIX
from downrange.protocol.bodies.consumers import ConsumerRunningInfo

SAME_SUBSCRIPTION: Final = "Same subscription in the same group of consumer"
DIFFERENT_SUBSCRIPTION: Final = "Different subscription in the same group of consumer!!!"
REBALANCE_OK: Final = "Rebalance OK"
REBALANCE_FAILED: Final = "Rebalance Failed"
_BROADCASTING: Final = "BROADCASTING"


@dataclass(frozen=True, slots=True)
class GroupVerdicts:
    """What the running members of a group say together; `reasons` has one line for each thing that is wrong."""

    is_subscribed_alike: bool
    is_balanced: bool
    reasons: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, str]:
        return (
            SAME_SUBSCRIPTION if self.is_subscribed_alike else DIFFERENT_SUBSCRIPTION,
            REBALANCE_OK if self.is_balanced else REBALANCE_FAILED,
        )


def judge(members: Mapping[str, ConsumerRunningInfo], queues: Collection[MessageQueue] = ()) -> GroupVerdicts:
    """Compare what members report. `queues` are those of the topics to which the group subscribes, as far as known."""
    reasons = []
    expressions = {name: subscriptions_of(info) for name, info in members.items()}
    for topic in sorted({topic for one in expressions.values() for topic in one}):
        wanted = {name: one.get(topic) for name, one in expressions.items()}
        if len(set(wanted.values())) > 1:
            told = ", ".join(
                f"{name} {'does not subscribe' if text is None else repr(text)}" for name, text in wanted.items()
            )
            reasons.append(f"{topic}: {told}")
    is_alike = not reasons
    balance = _balance_problems(members, queues) if _shares_queues(members) else []
    return GroupVerdicts(is_alike, not balance, (*reasons, *balance))


def subscriptions_of(info: ConsumerRunningInfo) -> dict[str, str]:
    """Topic -> expression; without the retry topic, which only some clients report."""
    return {one.topic: one.expression for one in info.subscription_set if not one.topic.startswith(RETRY_PREFIX)}


def _shares_queues(members: Mapping[str, ConsumerRunningInfo]) -> bool:
    """Whether each queue has one member: not if every member gets all messages, nor where brokers are asked to pop."""
    return all(
        info.properties.get("messageModel") != _BROADCASTING and not info.mq_pop_table for info in members.values()
    )


def _balance_problems(members: Mapping[str, ConsumerRunningInfo], queues: Collection[MessageQueue]) -> list[str]:
    held = Counter(queue for info in members.values() for queue, one in info.mq_table.items() if not one.dropped)
    problems = [f"{queue} is held by {count} members" for queue, count in sorted(held.items()) if count > 1]
    if members:
        problems += [f"{queue} is held by no member" for queue in sorted(set(queues) - held.keys())]
    return problems
