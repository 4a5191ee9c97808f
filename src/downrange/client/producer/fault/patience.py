"""How long to wait for a broker: a multiple of how long its answers take at worst. Pure.

The high-water mark of a broker's latencies rises with a slow answer at once and sinks by a hundredth with every other.
It stays close to the 99th percentile of the last few hundred answers, above rather than below, and costs two numbers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SINKS_BY: Final = 0.01


class Answers(NamedTuple):
    """The answers of one broker: how many, and the high-water mark of their latencies."""

    number: int
    high_millis: float

    def after(self, latency_millis: float, count: int = 1) -> Answers:
        """Take in more answers, of which none took longer than `latency_millis`."""
        return Answers(self.number + count, max(latency_millis, self.high_millis * (1 - SINKS_BY) ** count))


NOTHING_KNOWN: Final = Answers(0, 0.0)


def patience_millis(known: Answers, factor: float, enough_answers: float, least_millis: float) -> float:
    """`factor` times the high-water mark, at least `least_millis`; wider by `enough_answers / number` of it."""
    return max(least_millis, known.high_millis * factor * (1 + enough_answers / max(1, known.number)))
