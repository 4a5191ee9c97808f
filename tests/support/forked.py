"""Python programs as processes that start without imports: each is forked from a process that has done them all.

The processes are as real as others: each has its own memory, files and end. `python -m MODULE` is all that is known.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Final

_IMPORTED: Final = (
    "downrange.broker.app",
    "downrange.cli.broker",
    "downrange.cli.grpc_port",
    "downrange.cli.main",
    "downrange.cli.namesrv",
    "downrange.cli.process",
    "downrange.namesrv.app",
    "encodings.idna",
    "importlib.metadata",
    "pydantic.type_adapter",
    "pydantic.types",
    "tests.chaos.clients",
    "tests.chaos.faulty_broker",
    "tests.chaos.hasty_broker",
    "tests.support.transaction_sender",
    "uvloop",
    "zoneinfo",
)
"""What brokers, name servers and clients import, soon or late."""
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(list(_IMPORTED))


def is_forkable(command: Sequence[str]) -> bool:
    return tuple(command[:2]) == (sys.executable, "-m")


class Forked:
    """`python -m MODULE …`, with as much of the interface of a Popen as `Running` needs."""

    stdin: IO[str] | None = None

    def __init__(self, command: Sequence[str], env: Mapping[str, str], errors: IO[str]) -> None:
        mine, theirs = os.pipe()
        self.stdout = os.fdopen(mine)
        output = Connection(theirs, readable=False)
        complaints = Connection(os.dup(errors.fileno()), readable=False)
        arguments = (list(command[2:]), dict(env), output, complaints)
        self._process = _CONTEXT.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        output.close()
        complaints.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._process.exitcode


def _become(arguments: list[str], env: dict[str, str], output: Connection, complaints: Connection) -> None:
    """Run a module as this process's program."""
    os.dup2(output.fileno(), 1)
    os.dup2(complaints.fileno(), 2)
    output.close()
    complaints.close()
    os.environ.clear()
    os.environ.update(env)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = arguments
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)  # that is the point of it
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
