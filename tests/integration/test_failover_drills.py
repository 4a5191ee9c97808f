"""A few rounds of each failure drill of brokers under a controller; `python -m bench failover --controller` has many.

Whatever happens: no acknowledged message is lost, the consumer gets all of them, and all logs are equal afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.failover_controller import Life, Order, drill_fault, live, read, table
from bench.failover_rounds import CONTROLLED_FAULTS
from tests.support.network import MISSING, may_make_networks

IN_NETWORKS = [name for name, fault in CONTROLLED_FAULTS.items() if fault.needs_network]
HERE = [name for name, fault in CONTROLLED_FAULTS.items() if not fault.needs_network]


def order(name: str, tmp_path: Path) -> Order:
    return Order((name,), rounds=1, rate=200, stop_seconds=4.0, directory=tmp_path / "results")


def nothing_is_lost(life: Life) -> None:
    assert life["acknowledged"] > 0
    found = {key: life[key] for key in ("lost", "not_received", "queued_acknowledged", "logs_equal")}
    assert found == {"lost": 0, "not_received": 0, "queued_acknowledged": 0, "logs_equal": True}, life["complaints"]


@pytest.mark.parametrize("name", HERE)
async def test_nothing_acknowledged_is_lost(name: str, tmp_path: Path) -> None:
    nothing_is_lost(await live(tmp_path, name, order(name, tmp_path), rounds=2 if name == "kill" else 1))


@pytest.mark.skipif(not may_make_networks(), reason=MISSING)
@pytest.mark.parametrize("name", ["cut-slaves", "cut-controllers", "cut-all", "deaf-all", "truncation"])
async def test_nothing_acknowledged_is_lost_by_a_partition(name: str, tmp_path: Path) -> None:
    nothing_is_lost(await live(tmp_path, name, order(name, tmp_path), rounds=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HERE, *IN_NETWORKS])
async def test_nothing_acknowledged_is_lost_in_many_rounds(name: str, tmp_path: Path) -> None:
    nothing_is_lost(await live(tmp_path, name, order(name, tmp_path), rounds=20))


async def test_a_drill_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    wanted = order("kill", tmp_path)
    done: Life = {
        "fault": "kill", "rate": 1.0, "acknowledged": 10, "lost": 0, "duplicates": 0, "unconfirmed": 0, "failed": {},
        "not_received": 0, "logs_equal": True, "rounds": [{"gap": 0.25, "wait": 0.5, "load": 1.0}],
    }  # fmt: skip
    wanted.directory.mkdir()
    (wanted.directory / "failover-controller.json").write_text(json.dumps([done]))
    lives = read(wanted.directory)
    await drill_fault("kill", wanted, lives)  # its one round is done: no cluster is started
    assert lives == [done]
    assert "| kill -9 of the master | 1 | 10 | 0 |" in table(lives)
