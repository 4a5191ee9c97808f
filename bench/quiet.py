"""Conditions that a load is measured under, the same for every one: nothing left to write, memory at hand, a core each
for the generator and for the server's loop, and again when others used the processors meanwhile.

The rules are in bench/README.md. None of them looks at what a load found.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Final, TypeVar

from bench.report import QUICK

MEMORY_BYTES: Final = (64 if QUICK else 512) << 20
"""About what a load of a second writes."""
DISTURBED_CORES: Final = 0.1
ATTEMPTS: Final = 1 if QUICK else 3
MOST_REPEATS: Final = 10
"""In one process: on a machine that is always busy, repeating does not help, and the results are labelled anyway."""
_MADV_POPULATE_WRITE: Final = 23
_TICK: Final = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
_repeats = itertools.count(1)


def undisturbed(load: Callable[[], T]) -> T:
    """Run it, again if others took part of the processors; of all attempts the one during which they took least."""
    attempts: list[tuple[float, T]] = []
    while not attempts or (
        attempts[-1][0] > DISTURBED_CORES and len(attempts) < ATTEMPTS and next(_repeats) <= MOST_REPEATS
    ):
        os.sync()
        touch_memory(MEMORY_BYTES)
        before, started = _others_seconds(), monotonic()
        found = load()
        attempts.append(((_others_seconds() - before) / (monotonic() - started), found))
    return min(attempts, key=lambda attempt: attempt[0])[1]


def touch_memory(size: int) -> None:
    """Use memory and give it back, so that the kernel has as much at hand: a virtual machine's host may have taken
    away what was free, and a page that it has to find first costs ten times as much as one that was just used."""
    with mmap.mmap(-1, size) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # before Linux 5.14
            for at in range(0, size, mmap.PAGESIZE):
                memory[at] = 1


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
    return (user + nice + stolen - _family_user_ticks()) / _TICK


def _family_user_ticks() -> int:
    """User time of this process and all below it."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = int(fields[11])
    total = 0
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children[pid]
    return total
