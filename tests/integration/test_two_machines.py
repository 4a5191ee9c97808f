"""A broker that listens on every address, and clients on another machine: two network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import DOWNRANGE, Running

SERVER, CLIENT = "10.201.87.1", "10.201.87.2"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def _has_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"dr-probe-{os.getpid()}"
    made = _run("ip", "netns", "add", probe).returncode == 0
    if made:
        _run("ip", "netns", "del", probe)
    return made


needs_namespaces = pytest.mark.skipif(not _has_namespaces(), reason="network namespaces need root and iproute2")


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two namespaces with one cable between them; none has a route to anywhere else."""
    server, client = f"dr-s{os.getpid()}", f"dr-c{os.getpid()}"
    ends = f"drs{os.getpid() % 100000}", f"drc{os.getpid() % 100000}"
    try:
        for name in (server, client):
            assert _run("ip", "netns", "add", name).returncode == 0
        cable = ("type", "veth", "peer", "name", ends[1], "netns", client)
        made = _run("ip", "link", "add", ends[0], "netns", server, *cable)
        assert made.returncode == 0, made.stderr
        for name, end, address in ((server, ends[0], SERVER), (client, ends[1], CLIENT)):
            for command in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{address}/24", "dev", end),
                ("link", "set", end, "up"),
            ):
                assert _run("ip", "-n", name, *command).returncode == 0
        yield server, client
    finally:
        for name in (server, client):
            _run("ip", "netns", "del", name)


def on(machine: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", machine, *DOWNRANGE)


@needs_namespaces
def test_a_broker_on_every_address_tells_clients_one_that_they_can_reach(
    machines: tuple[str, str], tmp_path: Path
) -> None:
    server, client = machines
    options = ("--bind", "0.0.0.0", "--insecure", "--metrics-port", "-1", "--grpc-port", "-1", "-d", str(tmp_path))
    standalone = Running("standalone", *options, program=on(server))
    try:
        standalone.wait_for(rf"broker .*0\.0\.0\.0:10911, advertised as {SERVER}:10911 ")
        sent = _run(*on(client), "message", "send", "hello", "from afar", "-n", f"{SERVER}:9876")
        assert sent.returncode == 0, sent.stderr
        read = _run(*on(client), "consume", "hello", "-n", f"{SERVER}:9876")
        assert read.stdout.splitlines() == ["from afar"], read.stderr
        assert standalone.stop() == 0
    finally:
        standalone.close()


@needs_namespaces
def test_the_address_that_the_name_server_sees_is_advertised(machines: tuple[str, str], tmp_path: Path) -> None:
    server, client = machines
    options = ("--bind", "0.0.0.0", "--insecure")
    names = Running("namesrv", *options, "-d", str(tmp_path / "names"), program=on(client))
    broker = Running(
        "broker", *options, "-n", f"{CLIENT}:9876", "--metrics-port", "-1", "--grpc-port", "-1",
        "-d", str(tmp_path / "store"), program=on(server),
    )  # fmt: skip
    try:
        names.wait_for("ready on 0.0.0.0:9876")
        broker.wait_for(rf"ready on 0\.0\.0\.0:10911, advertised as {SERVER}:10911, registered with 1 of 1")
        assert (broker.stop(), names.stop()) == (0, 0)
    finally:
        broker.close()
        names.close()
