"""How warnings of the log reach the terminal of a command: one line with the time, and repeated ones seldom."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Final

from downrange.cli.output import visible

REPEAT_SECONDS: Final = 30.0
# What a connection says, the error of its request says as well.
_TOLD_OTHERWISE: Final = "downrange.transport"


class ThrottleRepeats(logging.Filter):
    """Lets a text pass once in `REPEAT_SECONDS`, and then says how often it was left out."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._passed: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = record.getMessage(), self._now()
        last = self._passed.get(text)
        if last is not None and now - last < REPEAT_SECONDS:
            self._left_out[text] = self._left_out.get(text, 0) + 1
            return False
        if len(self._passed) > 1000:
            self._passed.clear()
        self._passed[text] = now
        count = self._left_out.pop(text, 0)
        if count:
            record.msg, record.args = f"{text} ({count} more like it since)", ()
        return True


class _Terminal(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = visible(" ".join(record.getMessage().split()))
        print(f"downrange: {when} {record.levelname.lower()}: {text}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Print the warnings of this process on standard error; a server replaces this by its log."""
    handler = _Terminal(logging.WARNING)
    handler.addFilter(lambda record: not record.name.startswith(_TOLD_OTHERWISE))
    handler.addFilter(ThrottleRepeats())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
