from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from downrange.cli.main import main
from tests.unit.client.fake_cluster import FakeCluster, fake_cluster


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as one JSON document."""
        document = msgspec.json.decode(self.out)
        assert isinstance(document, dict)
        return document


Command = Callable[..., Result]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a `downrange` command in this process."""

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["downrange", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, printed.out, printed.err)

    return run


class RunningCluster:
    """A fake cluster on a thread of its own: a command runs its own event loop on the test's thread."""

    def __init__(self, directory: Path, *names: str) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.cluster: FakeCluster | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(directory, *names)))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self, directory: Path, *names: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with fake_cluster(directory, *names) as self.cluster:
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """Two brokers and a name server, whose address is in NAMESRV_ADDR."""
    running = RunningCluster(tmp_path, "broker-a", "broker-b")
    assert running.cluster is not None
    monkeypatch.setenv("NAMESRV_ADDR", running.cluster.namesrv)
    try:
        yield running.cluster
    finally:
        running.close()
