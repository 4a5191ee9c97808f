"""Figures, times and texts as people read them. Pure; the templates call these functions by name."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from downrange.model.text import Text

UNKNOWN: Final = Text("unknown")
_KEPT: Final = "\n\t"
_HIDDEN: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """Control characters and those that turn the direction of text, shown by their number instead of obeyed."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(one) for one in text)


def _shown(one: str) -> str:
    if one in _KEPT or unicodedata.category(one) not in _HIDDEN or one == "\u200d":
        return one
    return "\\r" if one == "\r" else f"⟨U+{ord(one):04X}⟩"


def number(value: float | None) -> str:
    """`12,480`; what is not known is said."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Messages a second."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f} %"


def size(value: float | None) -> str:
    """Bytes: `312 B`, `4.0 KiB`."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def span(millis: float | None) -> Text:
    """A length of time: `12 s`, `26 min`, `71 h`, `5 d`."""
    if millis is None:
        return UNKNOWN
    seconds = millis / 1000
    if seconds < 1:
        return Text("{count} ms", count=f"{millis:.0f}")
    if seconds < 120:
        return Text("{count} s", count=f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}")
    if seconds < 7200:
        return Text("{count} min", count=f"{seconds / 60:.0f}")
    if seconds < 96 * 3600:
        return Text("{count} h", count=f"{seconds / 3600:.0f}")
    return Text("{count} d", count=f"{seconds / 86400:.0f}")


def zone(name: str | None) -> tzinfo:
    """The time zone of a browser, from its cookie; UTC when there is none."""
    if not name:
        return UTC
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return UTC


def moment(millis: float | None, where: tzinfo, now: int, *, with_millis: bool = False) -> str:
    """`08:41` today, `11-15 08:41` this year; with milliseconds where messages are compared."""
    if not millis or millis <= 0:
        return Text("never") if millis == 0 else UNKNOWN
    try:
        then = datetime.fromtimestamp(millis / 1000, where)
    except (ValueError, OverflowError, OSError):
        return f"{millis:.0f}"
    today = datetime.fromtimestamp(now / 1000, where)
    clock = then.strftime("%H:%M:%S") if with_millis or abs(now - millis) < 3_600_000 else then.strftime("%H:%M")
    if with_millis:
        clock += f".{int(millis) % 1000:03d}"
    if then.date() == today.date():
        return clock
    return then.strftime("%m-%d " if then.year == today.year else "%Y-%m-%d ") + clock


def when(millis: float | None, where: tzinfo, now: int) -> str:
    """`08:41, 31 min ago`."""
    text = moment(millis, where, now)
    if not millis or millis <= 0:
        return text
    if millis <= now:
        return Text("{time}, {span} ago", time=text, span=span(now - millis))
    return Text("{time}, in {span}", time=text, span=span(millis - now))


def iso(millis: float | None) -> str:
    if not millis or not 0 < millis < 253_402_300_800_000:
        return ""
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(text: str, where: tzinfo) -> int | None:
    """Milliseconds of `2026-11-16T08:41`, of `08:41:00.120` with a date, or of a number of milliseconds; else None."""
    text = text.strip()
    if text.isdecimal() and len(text) >= 12:
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    if found.tzinfo is None:
        found = found.replace(tzinfo=where)
    return round(found.timestamp() * 1000)


def field_time(millis: int | None, where: tzinfo) -> str:
    """The value of an `<input type=datetime-local>`."""
    if not millis:
        return ""
    return datetime.fromtimestamp(millis / 1000, where).strftime("%Y-%m-%dT%H:%M:%S")
