"""The failure drill of brokers under a controller: three replicas, 1,000 sends a second, and one fault after the other.

    python -m bench failover --controller                             all faults, as often as the docs say: hours
    python -m bench failover --controller --fault kill --rounds 20
    python -m bench failover --controller --fault stop --clusters 8   eight small clusters at once

A producer and a consumer with their default settings run all the time. At the end of each cluster's life every
acknowledged message has to be on the master and with the consumer, and the logs of all replicas have to be equal, byte
by byte. Every cluster that ended is in `failover-controller.json`: a drill that was interrupted goes on where it was
(`--fresh` begins anew). Leaves `failover-controller.md` and a time line of the first round of each fault, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.failover_load import FailoverLoad
from bench.failover_rounds import CONTROLLED_FAULTS, ControlledFault, Drill
from bench.failover_timeline import draw, timeline
from downrange.transport.loop import run as run_loop
from tests.support.controlled_cluster import ControlledCluster, controlled_cluster
from tests.support.network import MISSING, may_make_networks, network

RESULTS: Final = Path(__file__).parent / "results"
FILE: Final = "failover-controller.json"
ROUNDS_OF_A_LIFE: Final = 20

Life = dict[str, Any]
"""What one cluster went through, as it stands in the file of results."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to drill."""

    faults: Sequence[str]
    rounds: int | None = None
    rate: float = 1000.0
    clusters: int = 1
    stop_seconds: float = 60.0
    directory: Path = RESULTS


async def live(directory: Path, name: str, order: Order, rounds: int) -> Life:
    """Start a cluster, do some rounds of a fault to it, and look at what is left."""
    fault = CONTROLLED_FAULTS[name]
    with ExitStack() as stack:
        net = stack.enter_context(network()) if fault.needs_network else None
        async with controlled_cluster(
            directory,
            controllers=fault.controllers,
            etcd_nodes=fault.etcd_nodes,
            settings=fault.settings,
            network=net,
        ) as cluster:
            load = FailoverLoad(cluster, order.rate / order.clusters)
            drill = Drill(cluster, load, order.stop_seconds)
            done: list[dict[str, Any]] = []
            line: dict[str, Any] = {}
            async with load.running():
                await load.acknowledges(int(load.rate) + 1)
                for _ in range(rounds):
                    done.append(await one_round(drill, fault))
                    line = line or timeline(drill.events, load)
            return await outcome(drill, name, done, line)


async def one_round(drill: Drill, fault: ControlledFault) -> dict[str, Any]:
    drill.events.clear()
    began, failed = time.monotonic(), drill.load.failed.total()
    async with drill.watched():
        await fault.round(drill)
        await drill.well_again()
    ended = time.monotonic()
    return {
        "gap": round(drill.load.longest_gap(began, ended)[0], 3),
        "wait": round(drill.load.longest_wait(began, ended), 3),
        "seconds": round(ended - began, 1),
        "failed": drill.load.failed.total() - failed,
        "load": round(os.getloadavg()[0], 1),
    }


async def outcome(drill: Drill, name: str, rounds: list[dict[str, Any]], line: dict[str, Any]) -> Life:
    """Compare what was acknowledged with what is there."""
    cluster, load = drill.cluster, drill.load
    await cluster.in_sync(len(cluster.brokers))
    stored = await load.stored(await cluster.master())
    acknowledged = [*load.acknowledged, *drill.queued_acknowledged]
    try:
        await cluster.logs_are_equal()
        is_equal = True
    except AssertionError:
        is_equal = False
    return {
        "fault": name,
        "rate": load.rate,
        "rounds": rounds,
        "acknowledged": len(acknowledged),
        "lost": sum(number not in stored for number in acknowledged),
        "duplicates": sum(times - 1 for times in stored.values()),
        "unconfirmed": load.unconfirmed,
        "failed": dict(load.failed),
        "failed_example": load.failed_example,
        "not_received": load.not_received,
        "queued_acknowledged": len(drill.queued_acknowledged),
        "hits": drill.hits,
        "logs_equal": is_equal,
        "complaints": complaints(cluster),
        "timeline": line,
    }


def complaints(cluster: ControlledCluster, most: int = 40) -> list[str]:
    """The last lines that servers wrote to their standard error."""
    lines = []
    for server in (*cluster.brokers, *cluster.controllers, cluster.namesrv):
        said = server.complaints + (server.process.errors if server.process is not None else "")
        lines += [f"{server.name}: {line}" for line in said.splitlines()[-most:]]
    return lines


# --- all rounds of a fault --------------------------------------------------------------------------------------------


async def drill_fault(name: str, order: Order, lives: list[Life]) -> None:
    """All rounds that are missing yet, some clusters at a time; each life is written when it ends."""
    wanted = order.rounds or CONTROLLED_FAULTS[name].rounds
    missing = wanted - sum(len(life["rounds"]) for life in lives if life["fault"] == name)
    share = min(ROUNDS_OF_A_LIFE, -(-missing // order.clusters)) if missing > 0 else 0

    async def work() -> None:
        nonlocal missing
        while missing > 0:
            rounds = min(share, missing)
            missing -= rounds
            with tempfile.TemporaryDirectory(prefix="failover-") as directory:
                lives.append(await live(Path(directory), name, order, rounds))
            write(order.directory, lives)
            print(table([life for life in lives if life["fault"] == name]).splitlines()[-1], flush=True)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(order.clusters):
            tasks.create_task(work())


def write(directory: Path, lives: list[Life]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / FILE).write_text(json.dumps(lives, indent=1) + "\n")
    (directory / "failover-controller.md").write_text(table(lives) + "\n")


def read(directory: Path) -> list[Life]:
    try:
        lives: list[Life] = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return []
    return lives


# --- the table --------------------------------------------------------------------------------------------------------

HEADER: Final = (
    "fault", "rounds", "acknowledged", "lost", "not consumed", "duplicates", "unconfirmed", "failed sends",
    "s without master: p50", "p99", "most", "s consumer waited: p50", "most", "logs equal", "load average",
)  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def row(name: str, lives: Sequence[Life]) -> list[str]:
    """One line of the table, of all lives with one fault."""
    rounds = [one for life in lives for one in life["rounds"]]
    gaps, waits = [one["gap"] for one in rounds], [one.get("wait", 0.0) for one in rounds]

    def total(key: str) -> str:
        return str(sum(life[key] for life in lives))

    loads = [one["load"] for one in rounds]
    return [
        CONTROLLED_FAULTS[name].summary, str(len(rounds)), total("acknowledged"), total("lost"), total("not_received"),
        total("duplicates"), total("unconfirmed"), str(sum(sum(life["failed"].values()) for life in lives)),
        f"{median(gaps):.2f}", f"{quantile(gaps, 0.99):.2f}", f"{max(gaps):.2f}",
        f"{median(waits):.2f}", f"{max(waits):.2f}",
        "yes" if all(life["logs_equal"] for life in lives) else "NO", f"{min(loads):.0f}-{max(loads):.0f}",
    ]  # fmt: skip


def table(lives: Sequence[Life]) -> str:
    names = [name for name in CONTROLLED_FAULTS if any(life["fault"] == name for life in lives)]
    rows = [row(name, [life for life in lives if life["fault"] == name]) for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in (HEADER, ["---"] * len(HEADER), *rows))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench failover --controller")
    parser.add_argument("--fault", nargs="+", choices=CONTROLLED_FAULTS, default=list(CONTROLLED_FAULTS))
    parser.add_argument("--rounds", type=int, help="of each fault; else as many as the docs say")
    parser.add_argument("--rate", type=float, default=1000.0, help="sends a second of all clusters together")
    parser.add_argument("--clusters", type=int, default=1, help="clusters at the same time")
    parser.add_argument("--stop-seconds", type=float, default=60.0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the results")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of these faults")
    given = parser.parse_args(arguments)
    if any(CONTROLLED_FAULTS[name].needs_network for name in given.fault) and not may_make_networks():
        sys.exit(f"bench: partitions cannot be made: {MISSING}")
    # A client whose broker is killed under it has a lot to say, and all of it is in the figures.
    logging.getLogger("downrange").setLevel(logging.CRITICAL)
    order = Order(given.fault, given.rounds, given.rate, given.clusters, given.stop_seconds, given.results)
    lives = [life for life in read(order.directory) if not (given.fresh and life["fault"] in order.faults)]
    for name in order.faults:
        run_loop(drill_fault(name, order, lives))
        line = next((life["timeline"] for life in lives if life["fault"] == name), None)
        if line:
            path = order.directory / f"failover-controller-{name}.png"
            print(draw(path, f"{CONTROLLED_FAULTS[name].summary}, {order.rate:g} sends a second", line))
    print(f"\n{table(lives)}")
