"""Warnings on the terminal of a command."""

from __future__ import annotations

import logging

from downrange.cli.shown_warnings import REPEAT_SECONDS, ThrottleRepeats


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("downrange.client", logging.WARNING, "", 0, text, (), None)


def test_a_repeated_warning_passes_once_in_a_while_and_says_how_often_it_came() -> None:
    now = [0.0]
    throttle = ThrottleRepeats(lambda: now[0])
    assert [throttle.filter(record("broker away")) for _ in range(5)] == [True, False, False, False, False]
    assert throttle.filter(record("another"))
    now[0] = REPEAT_SECONDS
    again = record("broker away")
    assert throttle.filter(again)
    assert again.getMessage() == "broker away (4 more like it since)"
