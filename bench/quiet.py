"""Conditions that a load is measured under, the same for every one: nothing left to do or to write, memory at hand, a
core each for the generator and for the server's loop, and again when others used the processors meanwhile.

The rules are in bench/README.md. None of them looks at what a load found.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Final, TypeVar

from bench.report import QUICK
from downrange.store.log.headroom import PIECE

MEMORY_BYTES: Final = (64 if QUICK else 1024) << 20
"""More than a load of a second writes."""
IDLE_CORES: Final = 0.1
"""Servers that use less, all together, have nothing left to do: some look at their queues every second."""
IDLE_SECONDS: Final = 0.2
LONGEST_WAIT_SECONDS: Final = 20.0
DISTURBED_CORES: Final = 0.1
ATTEMPTS: Final = 1 if QUICK else 3
MOST_REPEATS: Final = 10
"""In one process: on a machine that is always busy, repeating does not help, and the results are labelled anyway."""
_ZEROS: Final = bytes(PIECE)
_TICK: Final = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
_repeats = itertools.count(1)


def undisturbed(load: Callable[[], T]) -> T:
    """Run it, again if others took part of the processors; of all attempts the one during which they took least."""
    attempts: list[tuple[float, T]] = []
    while not attempts or (
        attempts[-1][0] > DISTURBED_CORES and len(attempts) < ATTEMPTS and next(_repeats) <= MOST_REPEATS
    ):
        settle()
        touch_memory(MEMORY_BYTES)
        before, started = _others_seconds(), monotonic()
        found = load()
        attempts.append(((_others_seconds() - before) / (monotonic() - started), found))
    return min(attempts, key=lambda attempt: attempt[0])[1]


def settle() -> None:
    """Wait until the servers below this process have done what the last load left them to do, and the disk, too."""
    deadline = monotonic() + LONGEST_WAIT_SECONDS
    while monotonic() < deadline:
        os.sync()
        before = sum(_family_ticks())
        sleep(IDLE_SECONDS)
        if sum(_family_ticks()) - before <= IDLE_CORES * IDLE_SECONDS * _TICK:
            return


def touch_memory(size: int, parent: Path | None = None) -> None:
    """Use memory and give it back, so that the kernel has as much at hand: a virtual machine's host may have taken
    away what was free, and a page that it has to find first costs five times as much as one that was just used.

    As a file, in pieces such as a broker writes: the kernel looks for pieces of different lengths at different places,
    so that what was used page by page is not what a log gets.
    """
    with tempfile.TemporaryFile(buffering=0, dir=parent) as file:
        for _ in range(0, size, PIECE):
            file.write(_ZEROS)


@contextmanager
def cores_apart(server_pid: int) -> Iterator[None]:
    """A core of its own for this process, another for the server's main thread, where its loop runs.

    Left to itself, the kernel often lets two processes that wake each other share a core while another is idle, and
    decides anew each time. With a single core there is nothing to keep apart.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        yield
        return
    own = max(cores)
    _keep_to(server_pid, cores - {own})
    _keep_to(0, {own})
    try:
        yield
    finally:
        _keep_to(0, cores)
        _keep_to(server_pid, cores)


@contextmanager
def core_shared(server_pid: int) -> Iterator[None]:
    """The same core for both."""
    cores = os.sched_getaffinity(0)
    _keep_to(server_pid, {max(cores)})
    _keep_to(0, {max(cores)})
    try:
        yield
    finally:
        _keep_to(0, cores)
        _keep_to(server_pid, cores)


def _keep_to(pid: int, cores: set[int]) -> None:
    with suppress(PermissionError):  # somebody else's process: it goes where it likes
        os.sched_setaffinity(pid, cores)


def _others_seconds() -> float:
    """CPU time so far that was not ours to use: user time of other programs, and what the host gave to other machines.

    Without the kernel's own time: writing our files to disk is part of that.
    """
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    user, nice, stolen = fields[0], fields[1], fields[7]
    return (user + nice + stolen - _family_ticks()[0]) / _TICK


def _family_ticks() -> tuple[int, int]:
    """User and system time of this process and all below it."""
    ticks: dict[int, tuple[int, int]] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = int(fields[11]), int(fields[12])
    user = system = 0
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        used = ticks.get(pid, (0, 0))
        user += used[0]
        system += used[1]
        waiting += children[pid]
    return user, system
