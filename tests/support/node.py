"""The JavaScript client `ali-ons` as real processes that print JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import Running

SCRIPTS = Path(__file__).parent.parent / "interop" / "node"

Line = dict[str, Any]


def node_modules() -> Path:
    """Where `ali-ons` is installed."""
    return installed_modules(SCRIPTS)


def installed_modules(scripts: Path) -> Path:
    """Where the packages of a package-lock.json are installed; done once, kept beside the virtual environment's."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    assert not missing, f"{' and '.join(missing)} not found: `make setup` installs nodejs and npm"
    lock = (scripts / "package-lock.json").read_bytes()
    cache = Path(sys.prefix) / "node" / hashlib.sha256(lock).hexdigest()[:16]
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as fresh:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(scripts / name, fresh)
            install = subprocess.run(
                ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=fresh, capture_output=True, text=True
            )
            assert install.returncode == 0, f"npm ci failed: {install.stderr}"
            os.rename(Path(fresh) / "node_modules", cache)  # whole or not at all, also when two runs install at once
    return cache


class NodeClient(Running):
    """One of our node scripts."""

    def __init__(self, script: str, options: Mapping[str, object]) -> None:
        super().__init__(
            json.dumps(options),
            program=("node", str(SCRIPTS / script)),
            env={"NODE_PATH": str(node_modules()), "NO_UPDATE_NOTIFIER": "1"},
        )

    def lines(self, event: str | None = None) -> list[Line]:
        """What it has printed so far."""
        printed: list[Line] = [json.loads(line) for line in list(self.output)]
        return printed if event is None else [line for line in printed if line["event"] == event]

    def messages(self) -> list[Line]:
        return self.lines("message")

    def wait_until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Until what it printed makes `condition` true."""
        deadline = time.monotonic() + seconds
        with self._news:
            while not condition():
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"not in {seconds:g} s; printed: {self.output}; standard error: {self.errors}"
                assert self._process.poll() is None, f"ended; standard error: {self.errors}"
                # Another process may be what the condition waits for: look again from time to time.
                self._news.wait(min(remaining, 0.05))

    def wait_for_messages(self, count: int, seconds: float = 60) -> list[Line]:
        self.wait_until(lambda: len(self.messages()) >= count, seconds)
        return self.messages()

    def assigned(self) -> set[int]:
        """The queues it has now."""
        lines = self.lines("assigned")
        return set(lines[-1]["queues"]) if lines else set()


@contextmanager
def consumer(**options: object) -> Iterator[NodeClient]:
    """A push consumer that has its queues; options: see consume.js."""
    client = NodeClient("consume.js", options)
    try:
        client.wait_until(client.assigned)
        yield client
    finally:
        client.close()


def produce(
    namesrv: str,
    *messages: Mapping[str, object],
    group: str = "nodeProducers",
    account: Mapping[str, str] | None = None,
) -> list[Line]:
    """Send messages in order; what the producer says of each."""
    order = {"namesrv": namesrv, "group": group, "messages": messages, "account": account}
    client = NodeClient("produce.js", order)
    try:
        assert client.wait(60) == 0, client.errors
        return client.lines()
    finally:
        client.close()
