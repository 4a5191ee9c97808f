"""Rounds of one row side by side, each in a process of its own: most rounds wait for most of their time."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Final

from downrange.transport.loop import run as run_loop
from tests.chaos.row import Played, Round, Row
from tests.sim.run import IN_MEMORY
from tests.support.processes import Running

LONGEST_SECONDS: Final = 2 * 3600
"""A soak lasts an hour, and its end is judged afterwards."""
START_SECONDS: Final = 1.0
"""Between the starts of two rounds: each begins with several processes, which would all want the processor at once."""
_FORK: Final = multiprocessing.get_context("fork")


def play(row: Row, seed: int, number: int, seconds_left: float) -> Played:
    """One round, in this process. Whatever goes wrong in it is a finding."""
    parent = IN_MEMORY if row.in_memory and IN_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="downrange-chaos-", dir=parent))
    round_ = Round(directory, random.Random(seed), number, seconds_left)
    Running.forks = True

    async def whole() -> None:
        async with asyncio.timeout(LONGEST_SECONDS):
            await row.play(round_)

    try:
        run_loop(whole())
    except Exception as error:
        traceback.print_exc()
        round_.wrong.append(f"the round broke: {error!r}"[:2000])
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return round_.played


@dataclass(frozen=True, slots=True)
class Lane:
    """A round that is under way."""

    seed: int
    process: BaseProcess
    answer: Connection


class Lanes:
    """Up to `row.lanes` rounds at a time. Holds always: no process is left when the block ends, however it ends."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._running: dict[Connection, Lane] = {}
        self._last_start = -START_SECONDS

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._running.values():
            lane.process.terminate()  # the round clears away what it started
        for lane in self._running.values():
            lane.process.join()

    @property
    def have_room(self) -> bool:
        return not self._running or (len(self._running) < self._row.lanes and self._pause <= 0)

    @property
    def _pause(self) -> float:
        """How long the next start has to wait."""
        return self._last_start + START_SECONDS - time.monotonic()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, number: int, deadline: float) -> None:
        seed = random.SystemRandom().randrange(1 << 32)
        mine, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_in_lane, args=(self._row, seed, number, deadline - time.monotonic(), theirs))
        process.start()
        self._last_start = time.monotonic()
        theirs.close()
        self._running[mine] = Lane(seed, process, mine)

    def ended(self) -> Iterator[tuple[int, Played]]:
        """Wait until a round has ended, or one more may start; the seeds of those that ended, and what they gave."""
        pause = max(0.0, self._pause) if len(self._running) < self._row.lanes else None
        for answer in wait(list(self._running), pause or None):
            assert isinstance(answer, Connection)
            lane = self._running[answer]
            try:
                played = answer.recv()
            except EOFError:
                played = Played(wrong=["the process of the round died"])
            lane.process.join()
            del self._running[answer]
            yield lane.seed, played


def _in_lane(row: Row, seed: int, number: int, seconds_left: float, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches `Lanes`, too, which ends this process by SIGTERM
    signal.signal(signal.SIGTERM, _break_off)
    with suppress(KeyboardInterrupt):
        answer.send(play(row, seed, number, seconds_left))


def _break_off(number: int, frame: FrameType | None) -> None:
    """Clear away what the round started. Errors that come of the end do not matter to anybody."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    raise KeyboardInterrupt
