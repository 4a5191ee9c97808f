"""Times as operators read and type them: local time, or milliseconds since 1970."""

from __future__ import annotations

from datetime import datetime, timedelta

from downrange.cli.options import UsageError

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
