"""Rows of a benchmark's table."""

from __future__ import annotations

from bench.report import Figure, compared, table


def test_a_figure_is_compared_unless_there_is_nothing_to_compare_with() -> None:
    assert compared("sends", 3.0, "/s", 2.0, "echo") == Figure("sends", 3.0, "/s", 1.5, "echo")
    assert compared("sends", 3.0, "/s", 0.0, "echo") == Figure("sends", 3.0, "/s")
    assert table([compared("sends", 3.0, "/s", 0.0, "echo")]).endswith("| sends | 3 /s |  |")
