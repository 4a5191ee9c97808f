from __future__ import annotations

import multiprocessing
import subprocess
import sys

from tests.support.lasting_port import lasting_port


def ports(count: int) -> list[int]:
    return [lasting_port() for _ in range(count)]


def check() -> None:
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as one, fork.Pool(1) as other:
        first, second = one.apply(ports, (20,)), other.apply(ports, (20,))
    assert first != second
    assert len(set(first)) == 20


def test_processes_that_were_forked_from_one_another_draw_different_ports() -> None:
    """Rounds of `make chaos` that run side by side once took the same port, if the machine was slow enough.

    In a process of its own: threads of other tests may hold a lock at the moment of a fork.
    """
    done = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as test; test.check()"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
