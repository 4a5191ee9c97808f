"""The failure drill: real broker processes are killed, stopped and slowed down while producers send.

    python -m bench failover        all faults with two and three brokers, about ten minutes
    python -m bench failover --brokers 2 --fault kill stop
    python -m bench failover --controller      brokers under a controller: see failover_controller.py

One producer for each fault strategy sends at a steady rate, all three at the same time to the same cluster, so that the
same fault meets all of them. Afterwards every queue is read to its end and compared with what was acknowledged. Leaves
`failover.json`, `failover.md` and `failover-*.png` in bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bench import failover_controller
from bench.failover_figures import Drilled, Record, Send, figures
from bench.failover_plot import plot
from bench.faults import FAULTS
from bench.report import Figure
from downrange.client.admin import Admin
from downrange.client.config import ClientConfig, ProducerConfig
from downrange.client.errors import NoRoute
from downrange.client.producer.fault import StrategyName, strategy
from downrange.client.producer.producer import AsyncProducer
from downrange.model.errors import MQError
from downrange.model.message import Message
from downrange.model.record import decode_records
from downrange.model.topics import TopicConfig
from downrange.protocol.bodies.offsets import GetMaxOffsetRequest
from downrange.protocol.codes import RequestCode
from downrange.protocol.command import request
from downrange.simulation import Plan, Report, simulate
from downrange.transport.loop import run as run_loop
from downrange.transport.pool import connect
from tests.support.broker_client import BrokerClient
from tests.support.process_cluster import BEHIND_PROXY, CLIENTS_REACH, ProcessCluster, process_cluster

RESULTS: Final = Path(__file__).parent / "results"
STRATEGIES: Final[tuple[StrategyName, ...]] = ("round_robin", "latency", "adaptive")
QUEUES: Final = 4
COMPARED: Final = ("kill", "stop", "slow")


@dataclass(frozen=True, slots=True)
class Load:
    """What each producer does. A caller sends one message after the other, `callers / rate` seconds from one to the
    next unless an answer takes longer."""

    rate: float = 250.0
    callers: int = 16
    send_timeout_seconds: float = 3.0
    attempt_timeout_seconds: float = 1.0

    @property
    def slow_millis(self) -> float:
        """Longer than a healthy send on a busy machine, shorter than one that waited for a silent broker."""
        return self.attempt_timeout_seconds * 1000 / 2

    def producer_config(self, name: StrategyName) -> ProducerConfig:
        return ProducerConfig(
            send_timeout_seconds=self.send_timeout_seconds,
            attempt_timeout_seconds=self.attempt_timeout_seconds,
            fault_strategy=name,
        )

    def plan(self, brokers: int, seconds: float) -> Plan:
        """The same for the simulator."""
        return Plan(
            producers=1,
            brokers=brokers,
            brokers_per_topic=brokers,
            queues_per_broker=QUEUES,
            faulty=1,
            rate_per_producer=self.rate,
            seconds=seconds,
            send_timeout_millis=self.send_timeout_seconds * 1000,
            attempt_timeout_millis=self.attempt_timeout_seconds * 1000,
        )


CLOSED_LOOP: Final = Load()
"""As a service with a few workers sends: those that wait for a slow broker send nothing meanwhile."""
OPEN_LOOP: Final = Load(callers=500)
"""So many callers that none waits for an answer: the load of the simulator."""


# --- one drill --------------------------------------------------------------------------------------------------------


async def drill(
    directory: Path, name: str, *, brokers: int = 2, load: Load = CLOSED_LOOP, seconds: float | None = None
) -> list[Drilled]:
    """One fault against one cluster, with a producer for each strategy."""
    fault = FAULTS[name]
    seconds = fault.seconds if seconds is None else seconds
    planned_start, planned_end = fault.window_millis(seconds)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            process_cluster(directory, brokers=brokers, behind_proxies=fault.needs_proxy)
        )
        origin = 0.0
        # Not the loop's time, which uvloop counts in whole milliseconds.
        records = [Record(each, lambda: (time.monotonic() - origin) * 1000) for each in STRATEGIES]
        await create_topics(cluster, [record.topic for record in records])
        producers = []
        for record in records:
            producer = AsyncProducer("drill", cluster.namesrv, load.producer_config(record.strategy), hooks=[record])
            await stack.enter_async_context(producer)
            await producer.queues(record.topic)
            producers.append(producer)
        # A slow broker is slow behind its proxy only.
        well = [
            f"{BEHIND_PROXY if fault.needs_proxy else CLIENTS_REACH}:{broker.port}"
            for number, broker in enumerate(cluster.brokers)
            if fault.needs_proxy or number not in fault.befalls(brokers)
        ]
        origin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(longest_wait(each, records[0].clock_millis, seconds * 1000)) for each in well]
            for record, producer in zip(records, producers, strict=True):
                tasks.create_task(steady_load(record, producer, load, seconds * 1000))
            await asyncio.sleep(planned_start / 1000)
            begun = records[0].clock_millis()
            await fault.begin(cluster)
            await asyncio.sleep((planned_end - records[0].clock_millis()) / 1000)
            await fault.end(cluster)
            ended = records[0].clock_millis()
        await drain(cluster, records)
    return [
        figures(
            record,
            name,
            brokers=[broker.name for broker in cluster.brokers],
            faulty=[cluster.brokers[number].name for number in fault.befalls(brokers)],
            seconds=seconds,
            fault_millis=(begun, ended),
            slow_millis=load.slow_millis,
            hiccup_millis=max((wait.result() for wait in waits), default=0.0),
        )
        for record in records
    ]


async def longest_wait(address: str, clock_millis: Callable[[], float], until_millis: float) -> float:
    """How long a broker that is well let a small request wait at most: what this machine adds to any send."""
    connection = await connect(address)
    small = request(RequestCode.GET_MAX_OFFSET, GetMaxOffsetRequest(topic="TBW102", queue_id=0))
    longest = 0.0
    while (asked := clock_millis()) < until_millis:
        await connection.request(small, 60)
        longest = max(longest, clock_millis() - asked)
        await asyncio.sleep(0.01)
    await connection.drain(1)
    return longest


async def create_topics(cluster: ProcessCluster, topics: Sequence[str]) -> None:
    """Returns when every name server knows every topic on every broker."""
    async with Admin(ClientConfig.of(cluster.namesrv)) as admin:
        for topic in topics:
            outcomes = await admin.topics.create(TopicConfig(topic, QUEUES, QUEUES), cluster="DefaultCluster")
            assert not outcomes.failed, outcomes.failed
    for namesrv in cluster.namesrvs:
        async with Admin(ClientConfig.of(namesrv.address)) as admin, asyncio.timeout(20):
            for topic in topics:
                while not await is_everywhere(admin, topic, len(cluster.brokers)):
                    await asyncio.sleep(0.05)


async def is_everywhere(admin: Admin, topic: str, brokers: int) -> bool:
    try:
        return len((await admin.topics.route(topic)).queue_datas) == brokers
    except NoRoute:
        return False


async def steady_load(record: Record, producer: AsyncProducer, load: Load, until_millis: float) -> None:
    """All callers of one producer, each at its own moments of a common rhythm."""
    numbers = iter(range(1 << 40))
    period = load.callers / load.rate * 1000

    async def call(caller: int) -> None:
        due = caller / load.rate * 1000
        while due < until_millis:
            await asyncio.sleep((due - record.clock_millis()) / 1000)
            number = next(numbers)
            started = record.clock_millis()
            error: str | None = None
            try:
                await producer.send(Message(record.topic, str(number).encode()))
            except MQError as problem:
                error = type(problem.__cause__ or problem).__name__
            ended = record.clock_millis()
            record.sends.append(Send(number, caller, started, ended, error))
            due += period
            if due < ended:  # what could not be sent meanwhile is not made up for
                due += (ended - due) // period * period + period

    async with asyncio.TaskGroup() as tasks:
        for caller in range(load.callers):
            tasks.create_task(call(caller))


async def drain(cluster: ProcessCluster, records: Sequence[Record], patience_seconds: float = 10) -> None:
    """Read every queue to its end. A broker that has just restarted may still be building its queues: what is missing
    is looked for again before it counts as lost."""
    deadline = time.monotonic() + patience_seconds
    while True:
        for record in records:
            record.copies.clear()
        for broker in cluster.brokers:
            client = BrokerClient(await connect(broker.address), "drill@1")
            for record in records:
                for queue_id in range(QUEUES):
                    await read_queue(client, record, queue_id)
            await client.connection.drain(1)
        if not any(record.missing for record in records) or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.5)


async def read_queue(client: BrokerClient, record: Record, queue_id: int) -> None:
    offset = 0
    while True:
        command = client.pull_command(record.topic, queue_id=queue_id, offset=offset)
        reply = await client.connection.request(command, 10)
        if reply.code != 0:
            return
        for message in decode_records(reply.body_bytes):
            record.copies[int(message.body)] += 1
            offset = message.queue_offset + 1


# --- reports ----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Drilled]) -> str:
    columns: dict[str, Callable[[Drilled], str]] = {
        "fault": lambda row: row.fault,
        "brokers": lambda row: str(row.brokers),
        "strategy": lambda row: row.report.strategy,
        "sends": lambda row: str(row.report.sends),
        "failed": lambda row: str(row.report.failed),
        "lost": lambda row: str(row.lost),
        "duplicates": lambda row: str(row.report.duplicates),
        "p50 ms": lambda row: f"{row.report.p50_millis:.1f}",
        "p99 ms": lambda row: f"{row.report.p99_millis:.0f}",
        "p99 ms in fault": lambda row: f"{row.report.fault_p99_millis:.0f}",
        "max ms": lambda row: f"{row.report.max_millis:.0f}",
        "slow sends": lambda row: str(row.slow),
        "… of one caller": lambda row: str(row.slow_of_one_caller),
        "share after 1 s": lambda row: f"{row.share_after_first_second:.1%}",
        "s of failures afterwards": lambda row: f"{row.failing_seconds_after:.1f}",
        "s to avoid": lambda row: seconds_text(row.report.seconds_to_avoid),
        "s to return": lambda row: seconds_text(row.report.seconds_to_return),
    }
    return markdown(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def comparison(rows: Sequence[tuple[Drilled, Report]]) -> str:
    """Drill and simulation side by side: `drilled / simulated`."""

    def both(figure: Callable[[Report], str]) -> Callable[[Drilled, Report], str]:
        return lambda drilled, simulated: f"{figure(drilled.report)} / {figure(simulated)}"

    columns: dict[str, Callable[[Drilled, Report], str]] = {
        "fault": lambda drilled, simulated: drilled.fault,
        "strategy": lambda drilled, simulated: simulated.strategy,
        "sends": both(lambda report: str(report.sends)),
        "failed": both(lambda report: str(report.failed)),
        "duplicates": both(lambda report: str(report.duplicates)),
        "p99 ms in fault": both(lambda report: f"{report.fault_p99_millis:.0f}"),
        "max ms": both(lambda report: f"{report.max_millis:.0f}"),
        "share in fault": both(lambda report: f"{report.fault_share:.1%}"),
        "s to avoid": both(lambda report: seconds_text(report.seconds_to_avoid)),
        "s to return": both(lambda report: seconds_text(report.seconds_to_return)),
    }
    return markdown(list(columns), [[cell(*row) for cell in columns.values()] for row in rows])


def seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def simulated(drilled: Drilled, load: Load, seconds: float) -> Report:
    """The same load, cluster and fault in virtual time."""
    scenario = FAULTS[drilled.fault].scenario
    assert scenario is not None
    return simulate(load.plan(drilled.brokers, seconds), scenario, strategy(drilled.report.strategy))  # type: ignore[arg-type]


async def run_all(
    faults: Sequence[str], broker_counts: Sequence[int]
) -> tuple[list[Drilled], list[tuple[Drilled, Report]]]:
    """All drills, and those that the simulator can repeat once more with its kind of load."""
    rows: list[Drilled] = []
    compared: list[tuple[Drilled, Report]] = []
    for brokers in broker_counts:
        for name in faults:
            print(f"{name} with {brokers} brokers, {FAULTS[name].seconds:g} s …", flush=True)
            with tempfile.TemporaryDirectory() as directory:
                rows += await drill(Path(directory), name, brokers=brokers)
    for name in COMPARED:
        if name in faults:
            print(f"{name} as in the simulator, {FAULTS[name].seconds:g} s …", flush=True)
            with tempfile.TemporaryDirectory() as directory:
                drilled = await drill(Path(directory), name, load=OPEN_LOOP)
            compared += [(each, simulated(each, OPEN_LOOP, FAULTS[name].seconds)) for each in drilled]
    return rows, compared


def run(faults: Sequence[str] = tuple(FAULTS), broker_counts: Sequence[int] = (2, 3)) -> list[Figure]:
    """Drill, write the results, return the figures that targets exist for."""
    # A client whose broker is killed under it has a lot to say, and all of it is in the figures.
    logging.getLogger("downrange").setLevel(logging.CRITICAL)
    rows, compared = run_loop(run_all(faults, broker_counts))
    RESULTS.mkdir(exist_ok=True)
    text = f"{table(rows)}\n\nDrilled / simulated, two brokers, callers that do not wait:\n\n{comparison(compared)}\n"
    (RESULTS / "failover.md").write_text(text)
    drills = [row.as_json() for row in rows]
    pairs = [{"drilled": row.as_json(), "simulated": asdict(report)} for row, report in compared]
    (RESULTS / "failover.json").write_text(json.dumps({"drills": drills, "compared": pairs}, indent=1))
    print(f"\n{text}")
    for name in faults:
        for brokers in broker_counts:
            shown = [row for row in rows if (row.fault, row.brokers) == (name, brokers)]
            print(plot(RESULTS / f"failover-{name}-{brokers}.png", FAULTS[name].summary, shown))
    found = [Figure("messages lost, all drills", sum(row.lost for row in rows), "messages")]
    for row in rows:
        label = f"{row.fault}, {row.brokers} brokers, {row.report.strategy}"
        found.append(Figure(f"{label}: failed sends", row.report.failed, "sends"))
        found.append(Figure(f"{label}: p99 during the fault", row.report.fault_p99_millis, "ms"))
    return found


def main(arguments: Sequence[str]) -> None:
    if "--controller" in arguments:
        failover_controller.main([argument for argument in arguments if argument != "--controller"])
        return
    parser = argparse.ArgumentParser(prog="python -m bench failover")
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--brokers", nargs="+", type=int, default=[2, 3])
    given = parser.parse_args(arguments)
    run(given.fault, given.brokers)


if __name__ == "__main__":
    main(sys.argv[1:])
