"""Start `downrange` and other commands as real processes and wait until they say they are ready."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from tests.support.forked import Forked, is_forkable

DOWNRANGE = (sys.executable, "-m", "downrange.cli.main")


class Running:
    """One process, of `downrange` unless told otherwise. Its output is read as it comes: it never blocks on a pipe."""

    forks: ClassVar[bool] = False
    """Whether Python programs are forked from a process that has imported them, for tests that start very many."""

    def __init__(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        program: tuple[str, ...] = DOWNRANGE,
        with_input: bool = False,
    ) -> None:
        """`with_input`: the process has a standard input, which `end_input` ends."""
        self.output: list[str] = []
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  lives as long as the process
        command = [*program, *arguments]
        known = {**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._process: subprocess.Popen[str] | Forked
        if self.forks and is_forkable(command) and not with_input:
            self._process = Forked(command, known, self._errors)
        else:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if with_input else None,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=known,
            )
        self._news = threading.Condition()
        self._is_all_read = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.output.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._is_all_read = True
            self._news.notify_all()

    def wait_for(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        """The first line of output that matches."""

        def found() -> re.Match[str] | None:
            return next((match for line in self.output if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or self._is_all_read, timeout=seconds)
            match = found()
        assert match is not None, f"no line like {pattern!r} in {self.output}; standard error: {self.errors}"
        return match

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self, seconds: float = 30) -> int:
        code = self._process.wait(seconds)
        self._reader.join(30)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._errors.close()


@contextmanager
def running(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Running]:
    process = Running(*arguments, env=env)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def namesrv(data: Path, *arguments: str) -> Iterator[tuple[Running, str]]:
    """A name server process on a free port, and its address."""
    with running("namesrv", "--port", "0", "--data", str(data), *arguments) as process:
        yield process, process.wait_for(r"name server ready on (\S+)")[1]
