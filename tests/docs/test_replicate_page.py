"""The configuration of docs/how-to/replicate.md makes a master and a slave."""

from __future__ import annotations

import asyncio
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

from tests.support.processes import DOWNRANGE, Running, namesrv
from tests.support.replica_processes import runtime_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "replicate.md"


def config(name: str) -> str:
    found = re.search(rf"<!-- config: {name} -->\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None, f"{PAGE.name} has no configuration {name}"
    return found[1]


def test_the_configuration_of_the_page_makes_a_master_and_its_slave(tmp_path: Path) -> None:
    with ExitStack() as lives:
        _, names = lives.enter_context(namesrv(tmp_path / "names"))
        brokers = []
        for name in ("master", "slave"):
            text = config(name).replace("127.0.0.1:9876", names).replace("/var/lib/downrange", str(tmp_path))
            text = re.sub(r"(listenPort|metricsPort)=\d+\n", "", text)
            text += "listenPort=0\nmetricsPort=0\ngrpcServerPort=-1\nmappedFileSizeCommitLog=4194304\n"
            (tmp_path / f"{name}.conf").write_text(text)
            broker = Running("broker", "--config", str(tmp_path / f"{name}.conf"))
            lives.callback(broker.close)
            brokers.append(broker.wait_for(r"ready on ([^\s,]+)")[1])
        listed = subprocess.run(
            [*DOWNRANGE, "cluster", "list", "-n", names], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        rows = [line.split() for line in listed.splitlines() if "broker-a" in line]
        assert {(row[2], row[3]) for row in rows} == {("0", brokers[0]), ("1", brokers[1])}, listed
        asyncio.run(slave_is_known(brokers[0]))
        sent = subprocess.run(
            [*DOWNRANGE, "message", "send", "orders", "hello", "-n", names],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
        assert "SEND_OK" in sent


async def slave_is_known(master: str) -> None:
    """A slave is ready before its master has heard of it."""
    async with asyncio.timeout(20):
        while "haSlaves" not in await runtime_of(master):
            await asyncio.sleep(0.02)
