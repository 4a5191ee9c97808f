"""The frame of every server process."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from downrange.cli.process import NEW_OBJECTS, serve


@pytest.fixture(autouse=True)
def _usual_collector() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_garbage_collector_of_a_server_does_not_look_at_every_few_objects() -> None:
    seen: list[tuple[int, ...]] = []
    usual = gc.get_threshold()

    @asynccontextmanager
    async def server() -> AsyncIterator[None]:
        seen.append(gc.get_threshold())
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    serve(server(), lambda running: ("", {}))
    assert seen == [(NEW_OBJECTS, *usual[1:])]
