"""One row of the scorecard: a fault, the figures asked, and the function that carries out one round of it.

A round is the unit that is resumed: it has a directory and a seed of its own, its figures count when it has ended, and
whatever it found wrong is kept with its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.history import Event, Report, check


@dataclass(frozen=True, slots=True)
class Played:
    """What a round gave."""

    figures: Counter[str] = field(default_factory=Counter)
    measured: dict[str, float] = field(default_factory=dict)
    """Figures that are not added up: the largest of all rounds counts."""
    wrong: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Round:
    """What one round is given, and what it gives back."""

    directory: Path
    """Empty, and removed after the round."""
    chance: random.Random
    number: int
    """How many rounds of the row began before."""
    seconds_left: float
    """Rounds that last as long as they are told look at this."""
    played: Played = field(default_factory=Played)

    @property
    def figures(self) -> Counter[str]:
        return self.played.figures

    @property
    def measured(self) -> dict[str, float]:
        return self.played.measured

    @property
    def wrong(self) -> list[str]:
        return self.played.wrong

    def judge(self, events: Sequence[Event], *, drained: bool = True) -> Report:
        """Ask the history checker, and count what it counted."""
        report = check(events, drained=drained)
        self.figures["acknowledged"] += report.sends
        self.figures["unanswered"] += report.unanswered
        self.figures["reads"] += report.reads
        self.figures["duplicates"] += report.duplicates
        self.wrong.extend(f"{fault.rule}: {fault.text}" for fault in report.faults)
        return report

    def demand(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            self.wrong.append(otherwise)


@dataclass(frozen=True, slots=True)
class Row:
    """Holds always: the figures of `asked` are among those that `play` counts."""

    number: int
    name: str
    fault: str
    asked: Mapping[str, int]
    promise: str
    play: Callable[[Round], Awaitable[None]]
    how: str
    """What a round does, in a sentence for the scorecard."""
    in_memory: bool = False
    """Whether rounds may run on a file system in memory: no process of theirs asks for a disk."""
    missing: Callable[[], str] = lambda: ""
    """What this machine lacks for the row; empty if nothing. Without it the row is left out."""
    lanes: int = 1
    """How many rounds run side by side."""

    def is_reached(self, figures: Mapping[str, float], scale: float) -> bool:
        return all(figures.get(name, 0) >= figure * scale for name, figure in self.asked.items())
