"""Which question to a broker comes next, and when: pure arithmetic on ages, on what is looked at, and on a budget.

Each kind of question has an interval, which is shorter for what somebody looks at. A broker is asked one question at a
time, at most `Pace.most_per_second`, and its `Budget` keeps the questions below `Pace.share` of its time. Where that is
not enough for all intervals, all of them become longer by the same factor.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

LONGEST_REST = 5.0
"""Seconds after which a broker is asked whatever the last questions cost: one that is silent must be noticed."""
LONGEST_DEBT = 60.0
NUDGE_SECONDS = 5.0
"""So much of a debt does not keep a question waiting that belongs to a page that was just opened."""
LEAST_CHARGE = 0.25
"""The broker is charged at least this part of the time that a question was under way."""


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
    share: float = 0.01
    """Of a broker's time, our questions may take this part."""

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


class Budget:
    """What the questions have cost one broker, and how long it is therefore left alone. Times are monotonic seconds.

    A broker's own time cannot be seen from here. It is taken to be the time for which a question was under way, less
    the time for which this process itself computed meanwhile: it wrote the question and read the answer.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._paid_at = 0.0
        self.charged = 0.0
        """Seconds of the broker's time that all questions took."""

    def __repr__(self) -> str:
        return f"<Budget charged={self.charged:.3f} s>"

    def charge(self, now: float, took: float, computed: float) -> None:
        """A question was under way for `took` seconds until `now`; meanwhile this process computed for `computed`."""
        cost = max(took - computed, LEAST_CHARGE * took)
        self.charged += cost
        self._paid_at = min(max(self._paid_at, now) + cost / self._pace.share, now + LONGEST_DEBT)

    def rest(self, now: float, *, is_nudged: bool = False) -> float:
        """Seconds until the next question; fewer when somebody has just opened a page."""
        debt = self._paid_at - now - (NUDGE_SECONDS if is_nudged else 0.0)
        return min(LONGEST_REST, max(1 / self._pace.most_per_second, debt))


class Wanted(NamedTuple):
    """A question that may be asked, and how urgent its answer is."""

    question: Question
    tier: Tier


_KIND_RANK = {kind: rank for rank, kind in enumerate(Kind)}
AT_ONCE = frozenset({Kind.RUNTIME, Kind.CONFIGS, Kind.SETTINGS, Kind.PRODUCERS, Kind.GROUP, Kind.MEMBERS})
"""Kinds that are asked for the first time without regard to the share, so that a page has something to show."""


def due(
    wanted: Iterable[Wanted], asked_at: dict[Question, float], pace: Pace, now: float
) -> tuple[list[Question], float]:
    """The questions of the next second, the most urgent first, and the seconds until another one is due.

    First the figures of the broker, by which it is known to answer, and what was never asked, by kind; then the others,
    by how many times their interval has gone by.
    """
    ready: list[tuple[tuple[int, float], Question]] = []
    soonest = pace.brokers
    for question, tier in wanted:
        last = asked_at.get(question)
        if last is None:
            ready.append(((0, _KIND_RANK[question.kind]), question))
            continue
        interval = pace.interval(question.kind, tier)
        left = last + interval - now
        if left > 0:
            soonest = min(soonest, left)
        else:
            is_first = question.kind is Kind.RUNTIME
            ready.append(((0, _KIND_RANK[question.kind]) if is_first else (1, left / interval), question))
    chosen = heapq.nsmallest(round(pace.most_per_second), ready)
    return [question for _, question in chosen], 0.0 if chosen else soonest
