"""Op messages: the notes in RMQ_SYS_TRANS_OP_HALF_TOPIC that half messages have ended."""

from __future__ import annotations

from typing import Final

REMOVE_TAG: Final = "d"


def ended_offsets(tags: str | None, body: bytes) -> list[int]:
    """The half messages that an op message says have ended: one in 4.9, several with commas between in 5.x."""
    if tags != REMOVE_TAG:
        return []
    return [int(text) for text in body.split(b",") if text.isdigit()]
