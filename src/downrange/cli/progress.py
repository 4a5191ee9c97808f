"""The progress of long work: one line on standard error, rewritten in place, and only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_PAUSE_SECONDS: Final = 0.2


class Progress:
    """Counts messages and shows the count a few times a second. Shows nothing when `is_shown` is False."""

    def __init__(self, what: str, total: int | None, is_shown: bool) -> None:
        self.count = 0
        self._what = what
        self._of = f" of {total:,}" if total is not None else ""
        self._is_shown = is_shown
        self._started = time.monotonic()
        self._next = self._started + _PAUSE_SECONDS
        self._has_line = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def rate(self) -> float:
        return self.count / max(self.seconds, 1e-9)

    def add(self, count: int = 1) -> None:
        self.count += count
        if self._is_shown and (now := time.monotonic()) >= self._next:
            self._next = now + _PAUSE_SECONDS
            self._has_line = True
            sys.stderr.write(f"\r\x1b[K{self._what} {self.count:,}{self._of} messages, {self.rate:,.0f}/s")
            sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line to make room for other output."""
        if self._has_line:
            self._has_line = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextmanager
def progress(what: str, total: int | None = None, *, shares_terminal: bool = False) -> Iterator[Progress]:
    """Show the progress of a block, but with `shares_terminal` only if standard output is not a terminal."""
    is_shown = sys.stderr.isatty() and not (shares_terminal and sys.stdout.isatty())
    shown = Progress(what, total, is_shown)
    try:
        yield shown
    finally:
        shown.clear()
