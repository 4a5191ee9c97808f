"""The tutorial, step by step, on ports of its own. The step of the lake is in tests/spark/test_tutorial_lake.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from downrange.cli.local_cluster import LocalCluster
from tests.support.processes import DOWNRANGE, Running, running
from tests.support.tutorial import Step, steps

STEPS = {step.title: step for step in steps()}


class Reader:
    """Somebody who does what the page says, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namesrv = "127.0.0.1:9876"

    def save(self, step: Step, pause: str = "0.005") -> None:
        """Write the programs of a step; `pause` is how long the sender rests after each order."""
        for name, program in step.files.items():
            program = program.replace("127.0.0.1:9876", self.namesrv).replace("sleep(0.005)", f"sleep({pause})")
            (self.directory / name).write_text(program)

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.directory,
            env={**os.environ, "PATH": f"{self._bin()}:{os.environ['PATH']}", "NAMESRV_ADDR": self.namesrv},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _bin(self) -> Path:
        """A directory with `downrange` and `python`, those of these tests."""
        directory = self.directory / "bin"
        if not directory.exists():
            directory.mkdir()
            for name, words in (("downrange", DOWNRANGE), ("python", DOWNRANGE[:1])):
                (directory / name).write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
                (directory / name).chmod(0o755)
        return directory


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    directory = tmp_path_factory.mktemp("tutorial")
    yield Reader(directory)
    cluster = LocalCluster.load(directory / "downrange-cluster")
    if cluster is not None:
        cluster.stop(20)


def test_the_page_has_all_steps() -> None:
    titles = [re.sub(r"^\d\. ", "", title) for title in STEPS]
    assert titles[1:7] == [
        "Start a cluster", "Send orders", "Consume them", "Kill a broker", "Look at the console", "Query the lake"
    ]  # fmt: skip


def test_start_send_and_consume(reader: Reader) -> None:
    up, *others = STEPS["1. Start a cluster"].commands
    reader.namesrv = re.findall(r"name server (\S+)", reader.run(f"{up} --namesrv-port 0"))[0]
    for command in others:
        shown = reader.run(command)
    assert "broker-a" in shown
    assert "broker-b" in shown
    for title in ("2. Send orders", "3. Consume them"):
        step = STEPS[title]
        reader.save(step, pause="0")
        outputs = [reader.run(command) for command in step.commands]
        if title == "2. Send orders":
            assert outputs[0].splitlines()[-1] == "all orders are sent"
            assert outputs[0].count("SEND_OK") == 10
            assert "#Message ID" in outputs[1]
        else:
            assert outputs[0] == "666 paid orders received\n"
            assert "Diff Total" in outputs[1]


def test_a_broker_is_killed_while_orders_are_sent(reader: Reader) -> None:
    sending, killing, waiting, looking, up, looking_again = STEPS["4. Kill a broker"].commands
    assert (sending, waiting) == ("python send.py &", "wait")
    reader.save(STEPS["2. Send orders"])
    with closing(Running(str(reader.directory / "send.py"), program=(sys.executable,))) as sender:
        sender.wait_for("^100 SEND_OK")
        assert "killed: broker-b" in reader.run(killing)
        sender.wait_for("all orders are sent")
    assert "not running: broker-b" in reader.run(looking)
    assert "cluster ready" in reader.run(up)
    deadline = time.monotonic() + 30
    while reader.run(looking_again).count("ASYNC_MASTER") != 2:
        assert time.monotonic() < deadline


def test_the_console_shows_the_cluster(reader: Reader) -> None:
    (command,) = STEPS["5. Look at the console"].commands
    assert command == "downrange console"
    with running("console", "--port", "0", "-n", reader.namesrv) as console:
        address = console.wait_for(r"ready on (http://\S+)")[1]
        with urllib.request.urlopen(address, timeout=30) as page:  # noqa: S310  # our own process
            assert "Downrange" in page.read().decode()


def test_clean_up(reader: Reader) -> None:
    (command,) = STEPS["Clean up"].commands
    assert "deleted" in reader.run(command)
    assert not (reader.directory / "downrange-cluster").exists()
