"""The life of a message as lanes on a time axis: an actor for each lane, a bar for each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from downrange.client.admin.timeline import Event


def lanes_of(events: Sequence[Event]) -> dict[str, Any] | None:
    """Lanes with bars in per cent of the whole time; None when there is no event."""
    if not events:
        return None
    begin = min(event.at for event in events)
    end = max(event.at + (event.millis or 0) for event in events)
    whole = max(1, end - begin)
    lanes: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        width = round(max(0.6, 100 * (event.millis or 0) / whole), 2)
        left = round(min(100 * (event.at - begin) / whole, 100 - width), 2)
        bar = {"begin": event.at, "millis": event.millis, "left": left, "width": width, "words": words_of(event)}
        is_bad = event.success is False or event.kind.value == "given up"
        lanes.setdefault(event.lane, []).append({**bar, "is_failed": is_bad})
    return {"begin": begin, "millis": whole, "lanes": [{"name": name, "bars": bars} for name, bars in lanes.items()]}


def words_of(event: Event) -> str:
    """One event in words."""
    parts = [event.kind.value]
    if event.kind.value == "delivered":
        parts = ["no end is known" if event.success is None else "consumed" if event.success else "failed"]
    if event.number:
        parts.append(f"delivery {event.number + 1}")
    if event.detail:
        parts.append(event.detail)
    if event.millis is not None:
        parts.append(f"{event.millis} ms")
    return ", ".join(parts)
