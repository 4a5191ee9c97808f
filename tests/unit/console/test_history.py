"""Rings and the file: spacing, thinning, and what is there after a restart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from downrange.console.history import DAY, History, Level, thinned
from downrange.console.history_file import HistoryFile, HistoryFileUnusable
from downrange.console.views.shared import chart_data


def test_a_level_takes_one_row_a_slot_and_forgets_old_ones() -> None:
    level = Level(10, 100, 1)
    taken = [level.add((float(second), 1.0)) for second in range(0, 30, 5)]
    assert taken == [True, False, True, False, True, False]
    for second in range(30, 10_000, 10):
        level.add((float(second), 1.0))
    assert 10 <= len(level) <= 12


def test_an_hour_is_fine_and_a_day_is_coarse() -> None:
    history = History()
    now = 1_000_000.0
    for second in range(0, 2 * 3600, 10):
        history.add("group:a", now + second, (second, None, 0))
    end = now + 2 * 3600
    assert 355 <= len(history.rows("group:a", end - 3600, end)) <= 361
    assert 118 <= len(history.rows("group:a", end - DAY, end)) <= 122
    assert math.isnan(history.rows("group:a", end - 3600, end)[0][2])


def test_the_hour_before_a_restart_is_still_there() -> None:
    history = History()
    now = 1_000_000.0
    history.put("group:a", [(now - 60 * minute, float(minute), 0.0, 0.0) for minute in range(20, 0, -1)])
    history.add("group:a", now, (0, None, 0))
    history.add("group:a", now + 10, (0, None, 0))
    assert [row[1] for row in history.rows("group:a", now - 3590, now + 10)] == [*range(20, 0, -1), 0, 0]


def test_charts_keep_gaps() -> None:
    rows = [(0.0, 1.0), (10.0, 2.0), (20.0, 3.0), (500.0, 4.0), (510.0, math.nan)]
    assert chart_data(rows, 1) == [[0, 10, 20, 30, 500, 510], [1, 2, 3, None, 4, None]]


def test_thinning_keeps_the_last() -> None:
    rows = [(float(number), 1.0) for number in range(1000)]
    assert len(thinned(rows, 100)) == 100
    assert thinned(rows, 100)[-1] == rows[-1]


def test_the_file_survives_and_is_thinned(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.db"
    now = 100 * DAY
    file = HistoryFile(path)
    minutes = [("group:a", (float(now - 3 * DAY + 60 * number), float(number))) for number in range(3 * 1440)]
    file.write_figures("prod", minutes)
    file.write_figures("prod", [("group:old", (float(now - 40 * DAY), 1.0)), ("group:gap", (float(now), math.nan))])
    file.close()
    file = HistoryFile(path)
    assert len(file.figures("prod", "group:a", now - DAY)) == 1440
    file.thin(now)
    assert len(file.figures("prod", "group:a", now - DAY)) == 1440
    assert len(file.figures("prod", "group:a", 0)) == 1440 + 2 * 144
    assert file.names("prod", 0) == ["group:a", "group:gap"]
    assert math.isnan(file.figures("prod", "group:gap", 0)[0][1])
    file.close()


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HistoryFileUnusable, match="name a file that can be written"):
        HistoryFile(tmp_path)


def test_since_when_a_group_is_behind() -> None:
    history = History()
    for second, behind in enumerate((5, 0, 3, 4, 9)):
        history.add("group:a", 1000.0 + 10 * second, (behind, None, 0))
    assert history.above_zero_since("group:a", 1040) == 1020
    history.add("group:a", 1050, (0, None, 0))
    assert history.above_zero_since("group:a", 1050) is None
