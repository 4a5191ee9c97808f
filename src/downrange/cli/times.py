"""Times as operators read and type them: local time, or milliseconds since 1970."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from downrange.cli.options import UsageError

_SPAN: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")
_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_FORMATS = ("%Y-%m-%d#%H:%M:%S:%f", "%Y-%m-%d#%H:%M:%S")


def parse_time(text: str) -> int:
    """Read milliseconds, `2026-11-15 08:00`, `2026-11-15T08:00:00.5` or `2026-11-15#08:00:00:000`."""
    if is_number(text):
        return int(text)
    for form in _FORMATS:
        try:
            return _millis(datetime.strptime(text, form).astimezone())
        except (ValueError, OverflowError):
            pass
    try:
        return _millis(datetime.fromisoformat(text).astimezone())
    except (ValueError, OverflowError):
        raise UsageError(f"{text!r} is not a time: expected `2026-11-15 08:00:00` or milliseconds since 1970") from None


def parse_span(text: str) -> float:
    """Read `1500ms`, `90s`, `5m`, `2h` or `1d`; in seconds."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is not a time span: expected a number followed by ms, s, m, h or d")
    return float(found[1]) * _UNIT_SECONDS[found[2]]


def is_number(text: str) -> bool:
    """Whether the text is a whole number of at most 64 bits."""
    return text.isascii() and text.isdigit() and len(text) < 19


def _millis(moment: datetime) -> int:
    return (moment - datetime.fromtimestamp(0).astimezone()) // timedelta(milliseconds=1)


def time_text(millis: int | None) -> str:
    """`2026-11-15 08:41:59,823`; empty for no time, a plain number if no calendar has it, as in damaged records."""
    if not millis or millis < 0:
        return ""
    try:
        moment = datetime.fromtimestamp(millis / 1000).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{millis} ms"
    return f"{moment:%Y-%m-%d %H:%M:%S},{millis % 1000:03}"
