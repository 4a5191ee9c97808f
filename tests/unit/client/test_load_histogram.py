"""Percentiles, and when messages of an open loop are due."""

from __future__ import annotations

import random

import pytest

from downrange.load.histogram import Histogram
from downrange.load.schedule import Schedule


def test_percentiles_are_close_to_those_of_the_sorted_values() -> None:
    chance = random.Random(7)
    values = sorted(int(chance.lognormvariate(12, 2)) for _ in range(20_000))
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    for percent in (1, 50, 90, 99, 99.9):
        exact = values[int(len(values) * percent / 100) - 1]
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.016)
    assert histogram.largest == values[-1]
    assert histogram.percentile(100) == pytest.approx(values[-1], rel=0.016)
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_small_values_are_exact_and_many_at_once_count_as_many() -> None:
    histogram = Histogram()
    histogram.record(100, 99)
    histogram.record(5)
    assert (histogram.count, histogram.percentile(50), histogram.percentile(1)) == (100, 100, 5)


def test_an_empty_histogram_says_zero() -> None:
    assert (Histogram().percentile(99), Histogram().mean) == (0, 0)


def test_a_message_is_due_at_its_own_time_however_late_it_is_sent() -> None:
    schedule = Schedule(100.0, started=50.0)
    assert schedule.due(50.0, 10) == [50_000_000_000]
    assert schedule.due(50.005, 10) == []
    assert schedule.next_due == pytest.approx(50.01)
    late = schedule.due(50.0351, 10)
    assert [moment / 1e9 for moment in late] == pytest.approx([50.01, 50.02, 50.03])


def test_how_late_messages_are_sent_is_known() -> None:
    """The first in time; then three together, of which the first was due 25 ms before."""
    schedule = Schedule(100.0, started=50.0)
    schedule.due(50.0, 10)
    schedule.due(50.035, 10)
    assert schedule.latency.count == 4
    assert schedule.latency.percentile(25) == 0
    assert schedule.latency.percentile(50) / 1e6 == pytest.approx(25, rel=0.02)
    assert schedule.latency.largest / 1e6 == pytest.approx(25)


def test_what_there_is_no_room_for_stays_due() -> None:
    schedule = Schedule(100.0, started=0.0)
    assert len(schedule.due(0.0951, 4)) == 4
    assert schedule.due(0.0951, 0) == []
    assert [moment / 1e9 for moment in schedule.due(0.0951, 99)] == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.08, 0.09])
