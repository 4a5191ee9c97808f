"""`downrange broker` on a disk that fails when it is told to: `CHAOS_DISK=FILE python -m tests.chaos.faulty_broker …`.

FILE holds one word: `fsync` lets every sync fail, `full` everything that needs room, `slow` makes each sync take
SLOW_SECONDS. The time of the first failure of each kind since FILE was written last is appended to FILE.errors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from downrange.cli.main import main
from downrange.store.files import OsFiles

SLOW_SECONDS: Final = 0.3


class Control:
    """What the disk is told."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: tuple[str, int] = ("", 0)

    def word(self) -> str:
        try:
            return self._path.read_text().strip()
        except FileNotFoundError:
            return ""

    def fail(self, number: int) -> None:
        told = (self.word(), self._path.stat().st_mtime_ns)
        if told != self._told:
            self._told = told
            with self._path.with_suffix(".errors").open("a") as file:
                file.write(f"{told[0]} {time.monotonic_ns()}\n")
        raise OSError(number, os.strerror(number))


def install(control: Control) -> None:
    """Put the faults under all files of this process."""

    def faulty(name: str) -> Callable[..., Any]:
        right = getattr(OsFiles, name)

        def call(self: OsFiles, *arguments: Any, **options: Any) -> Any:
            word = control.word()
            if name == "sync":
                if word == "fsync":
                    control.fail(errno.EIO)
                if word == "slow":
                    time.sleep(SLOW_SECONDS)
            elif word == "full":
                control.fail(errno.ENOSPC)
            return right(self, *arguments, **options)

        return call

    for name in ("create", "reserve", "write_at", "sync"):
        setattr(OsFiles, name, faulty(name))


if __name__ == "__main__":
    install(Control(Path(os.environ["CHAOS_DISK"])))
    main()
