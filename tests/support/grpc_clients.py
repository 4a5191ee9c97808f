"""The official gRPC clients of RocketMQ, from PyPI and npm, as real processes that print JSON lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

from tests.support.node import NodeClient, installed_modules
from tests.support.processes import Running

INTEROP: Final = Path(__file__).parent.parent / "interop"
PYTHON_CLIENT: Final = "rocketmq-python-client==5.1.2"

Language = Literal["python", "node"]
LANGUAGES: Final[tuple[Language, ...]] = ("python", "node")


def python_packages() -> Path:
    """Where the Python client is installed; apart, for it shares the name of its package with the C++ client."""
    cache = Path(sys.prefix) / "grpc-client" / PYTHON_CLIENT.replace("==", "-")
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as fresh:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{fresh}/all", PYTHON_CLIENT]
            install = subprocess.run(command, capture_output=True, text=True)
            assert install.returncode == 0, f"pip install failed: {install.stderr}"
            os.rename(Path(fresh) / "all", cache)  # whole or not at all, also when two runs install at once
    return cache


def node_packages() -> Path:
    return installed_modules(INTEROP / "grpc_node")


class GrpcClient(NodeClient):
    """One of our programs around an official client; see interop/grpc_python/client.py for orders and lines."""

    def __init__(self, language: Language, kind: str, order: Mapping[str, object]) -> None:
        if language == "python":
            program: tuple[str, ...] = (sys.executable, str(INTEROP / "grpc_python" / "client.py"))
            env = {"PYTHONPATH": str(python_packages())}
        else:
            node = shutil.which("node")
            assert node is not None, "node not found: `make setup` installs nodejs"
            program = (node, str(INTEROP / "grpc_node" / "client.js"))
            env = {"NODE_PATH": str(node_packages())}
        Running.__init__(self, kind, json.dumps(order), program=program, env=env, with_input=True)

    def bodies(self, event: str = "message") -> list[str]:
        return [line["body"] for line in self.lines(event)]


def produce(
    language: Language, endpoints: str, *messages: Mapping[str, object], **order: object
) -> list[dict[str, Any]]:
    """Send messages in order; what the producer says of each."""
    topics = sorted({str(message["topic"]) for message in messages})
    client = GrpcClient(language, "produce", {"endpoints": endpoints, "topics": topics, "messages": messages, **order})
    try:
        assert client.wait(60) == 0, (client.output, client.errors)
        return [line for line in client.lines() if line["event"] != "done"]
    finally:
        client.close()


@contextmanager
def started(language: Language, kind: str, **order: object) -> Iterator[GrpcClient]:
    """A client that works until the block ends: a consumer, or a producer with `stay`."""
    client = GrpcClient(language, kind, order)
    try:
        client.wait_until(lambda: client.lines("started") or client.lines("done"))
        yield client
    finally:
        client.close()


def receive(language: Language, endpoints: str, topic: str, group: str, count: int, **order: object) -> list[Any]:
    """Messages that a simple consumer gets; it ends when it has so many."""
    client = GrpcClient(
        language, "simple", {"endpoints": endpoints, "topic": topic, "group": group, "count": count, **order}
    )
    try:
        assert client.wait(90) == 0, (client.output, client.errors)
        return client.messages()
    finally:
        client.close()
