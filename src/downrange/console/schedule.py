"""Which question to a broker comes next: pure arithmetic on ages, on what is looked at, and on a budget.

One question at a time for each broker, at most `Pace.most_per_second`, and never more than `Pace.share` of its time: a
question that took t seconds is followed by a rest of t / share. Each kind of question has an interval. What somebody
looks at is asked for every `Pace.seen` seconds, before anything else that is due.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

LONGEST_REST = 5.0


class Kind(StrEnum):
    """The kinds of questions, in the order in which a broker that was never asked is asked them."""

    RUNTIME = "runtime"
    CONFIGS = "configs"
    SETTINGS = "settings"
    PRODUCERS = "producers"
    GROUP = "group"
    MEMBERS = "members"
    TOPIC = "topic"
    AGES = "ages"
    MEMBER = "member"
    WAITING = "waiting"


class Question(NamedTuple):
    """One small request to one broker: about itself, a topic, a group, or a member of a group."""

    kind: Kind
    name: str = ""
    member: str = ""


class Tier(StrEnum):
    """How urgent the answer is."""

    SEEN = "seen"
    BEHIND = "behind"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what is asked for, in seconds, and how much a broker may be burdened."""

    brokers: float = 5.0
    seen: float = 5.0
    behind: float = 10.0
    others: float = 60.0
    configs: float = 15.0
    most_per_second: float = 100.0
    topics_per_second: int = 20
    """Of topics that nobody looks at: there may be tens of thousands, so that they are taken in turn."""
    share: float = 0.02
    """Of the time, one of our questions may be under way: about half of it is the work of the broker."""
    first_round_is_quick: bool = True

    def interval(self, kind: Kind, tier: Tier) -> float:
        if kind is Kind.RUNTIME:
            return self.brokers
        if kind in (Kind.CONFIGS, Kind.SETTINGS, Kind.PRODUCERS):
            return self.configs
        if kind is Kind.WAITING:
            return self.others
        if tier is Tier.SEEN:
            return self.seen
        return self.behind if tier is Tier.BEHIND else self.others

    def longer(self, kind: Kind, took: float) -> float:
        """Seconds by which the interval of a large answer is longer: configurations of 10,000 topics take 66 ms."""
        return min(60.0, 300 * took) if kind is Kind.CONFIGS else 0.0

    def rest(self, took: float, *, is_first_round: bool) -> float:
        """Seconds to wait after a question that took `took` seconds."""
        least = 1 / self.most_per_second
        if is_first_round and self.first_round_is_quick:
            return least
        return min(LONGEST_REST, max(least, took / self.share - took))


class Wanted(NamedTuple):
    """A question that may be asked, and how urgent its answer is."""

    question: Question
    tier: Tier


_RANK = {Tier.SEEN: 0, Tier.BEHIND: 1, Tier.OTHER: 2}
_KIND_RANK = {kind: rank for rank, kind in enumerate(Kind)}


def due(
    wanted: Iterable[Wanted], asked_at: dict[Question, float], pace: Pace, now: float
) -> tuple[list[Question], float]:
    """The questions of the next second, the most urgent first, and the seconds until another one is due.

    First those that were never asked, by kind; then what somebody looks at; then by how overdue they are.
    """
    ready: list[tuple[tuple[float, ...], Question]] = []
    soonest = pace.brokers
    for question, tier in wanted:
        last = asked_at.get(question)
        if last is None:
            rank: tuple[float, ...] = (0, _KIND_RANK[question.kind], _RANK[tier])
        else:
            interval = pace.interval(question.kind, tier)
            left = last + interval - now
            if left > 0:
                soonest = min(soonest, left)
                continue
            rank = (1, _RANK[tier], left / interval)
        ready.append((rank, question))
    chosen = heapq.nsmallest(round(pace.most_per_second), ready)
    return [question for _, question in chosen], 0.0 if chosen else soonest
