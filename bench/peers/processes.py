"""A server program of somebody else, for the time of a benchmark."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.clients import RunningPeer
from bench.peers.driver import PATH, PeerFailed, wait_until_listening
from downrange.load.server_process import listening_at


@contextmanager
def program(
    command: Sequence[str], address: str, directory: Path, environment: Mapping[str, str] | None = None
) -> Iterator[RunningPeer]:
    """Started, ready, and stopped. The command must become the server, not start it beside itself."""
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "PATH": PATH, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
        )  # in our process group: whoever kills that, kills the server too
        try:
            try:
                wait_until_listening(address, lambda: process.poll() is None)
            except PeerFailed as error:
                last = (directory / "log").read_text(errors="replace").strip().splitlines()[-1:]
                raise PeerFailed(f"{error}: {' '.join(last)}") from None
            server = listening_at(address)
            if server is None:
                raise PeerFailed(f"cannot see which process listens at {address}")
            yield RunningPeer(address, server)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
