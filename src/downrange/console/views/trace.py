"""The life of a message as lanes on a time axis: an actor for each lane, a bar for each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from downrange.client.admin.timeline import Event
from downrange.console.words import word
from downrange.model.text import Text, joined


def lanes_of(events: Sequence[Event]) -> dict[str, Any] | None:
    """Lanes with bars in per cent of the whole time; None when there is no event."""
    if not events:
        return None
    begin = min(event.at for event in events)
    end = max(event.at + (event.millis or 0) for event in events)
    whole = max(1, end - begin)
    lanes: dict[Text, list[dict[str, Any]]] = {}
    for event in events:
        width = round(max(0.6, 100 * (event.millis or 0) / whole), 2)
        left = round(min(100 * (event.at - begin) / whole, 100 - width), 2)
        bar = {"begin": event.at, "millis": event.millis, "left": left, "width": width, "words": words_of(event)}
        is_bad = event.success is False or event.kind.value == "given up"
        lanes.setdefault(event.lane, []).append({**bar, "is_failed": is_bad})
    return {"begin": begin, "millis": whole, "lanes": [{"name": name, "bars": bars} for name, bars in lanes.items()]}


def words_of(event: Event) -> Text:
    """One event in words."""
    parts = [word(event.kind.value)]
    if event.kind.value == "delivered":
        is_good = event.success
        parts = [Text("no end is known") if is_good is None else Text("consumed") if is_good else Text("failed")]
    if event.number:
        parts.append(Text("delivery {number}", number=event.number + 1))
    if event.detail:
        parts.append(event.detail)
    if event.millis is not None:
        parts.append(Text("{count} ms", count=event.millis))
    return joined(", ", parts)
