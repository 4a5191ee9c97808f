"""The handle with which the sender of a timer message can recall it."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final, NamedTuple

_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_PARTS: Final = 5


class RecallHandle(NamedTuple):
    """The parts of a handle, which is text for those who get it."""

    topic: str
    broker_name: str
    time: int
    """TIMER_OUT_MS + 1: a deletion that is timed so is due in the tick of the message."""
    message_id: str

    def encode(self) -> str:
        text = f"v1 {self.topic} {self.broker_name} {self.time} {self.message_id}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @staticmethod
    def decode(handle: str) -> RecallHandle | None:
        """The parts of a handle; None for a text that is none."""
        try:
            parts = base64.b64decode(handle.encode(), b"-_", validate=True).decode().split(" ")
        except (binascii.Error, ValueError):
            return None
        if len(parts) != _PARTS or parts[0] != "v1" or _NUMBER.fullmatch(parts[3]) is None:
            return None
        return RecallHandle(parts[1], parts[2], int(parts[3]), parts[4])
