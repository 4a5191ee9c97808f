"""`downrange bench`: put a load on any broker that speaks RocketMQ's protocol and report how fast it was."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.options import Json, Namesrv, UsageError
from downrange.cli.output import Answer, Column, Table, print_answer
from downrange.settings import ConfigError
from downrange.transport.loop import run as run_loop

if TYPE_CHECKING:
    from downrange.load import LoadReport, Target

_ENOUGH = 1 / 3


class Workload(StrEnum):
    SEND = "send"
    PULL = "pull"
    END_TO_END = "end-to-end"


class HeaderChoice(StrEnum):
    JSON = "json"
    BINARY = "binary"


def run(
    workload: Annotated[
        Workload,
        typer.Argument(help="send messages; pull all messages of a topic; or send and receive at a steady rate."),
    ] = Workload.SEND,
    namesrv: Namesrv = None,
    broker: Annotated[
        str | None, typer.Option("--broker", "-b", help="The broker: host:port, or a name if there are several.")
    ] = None,
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic; created if missing.")] = "DownrangeBench",
    queues: Annotated[int, typer.Option(help="Queues of a topic that is created here, 1 to 10.")] = 4,
    topics: Annotated[
        int, typer.Option(help="Number of topics: TOPIC-00001 and so on, each message goes to a random one.")
    ] = 1,
    size: Annotated[int, typer.Option(help="Bytes of a message body.")] = 128,
    connections: Annotated[int | None, typer.Option(help="Connections. [send 8, pull 4]")] = None,
    outstanding: Annotated[
        int | None, typer.Option(help="Unanswered requests on each connection. [send 32, pull 8]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Messages in one send; with more than one, sends are batches.")] = 1,
    keys: Annotated[bool, typer.Option(help="Give each message a key, which the broker indexes.")] = True,
    rate: Annotated[
        float | None, typer.Option(help="Messages a second, at set times. [send: no limit, end-to-end: 500]")
    ] = None,
    pull_batch: Annotated[int, typer.Option(help="Messages asked for in one pull.")] = 32,
    header: Annotated[HeaderChoice, typer.Option(help="Encoding of request headers.")] = HeaderChoice.JSON,
    poll: Annotated[
        bool, typer.Option("--poll", help="Never sleep while waiting for replies; needs a core of its own.")
    ] = False,
    seconds: Annotated[float | None, typer.Option(help="How long to measure. [send 5, pull until drained]")] = None,
    warm_up: Annotated[float, typer.Option(help="Seconds of load before measuring.")] = 1.0,
    server_pid: Annotated[
        int | None,
        typer.Option(help="Process whose CPU and memory are measured. [the process that listens at a local address]"),
    ] = None,
    json: Json = False,
) -> None:
    """Put a load on a broker, check every reply, and report rate, latency and CPU time per message.

    The messages stay in the topic: do not use a topic that matters.
    """
    from downrange.load import HEADERS, PullPlan, SendPlan, end_to_end, find_target, pull_load, send_load

    kind = HEADERS[header.value]
    if rate is None and workload is Workload.END_TO_END:
        rate = 500.0
    try:
        plan: SendPlan | PullPlan
        if workload is Workload.PULL:
            plan = PullPlan(
                seconds=600.0 if seconds is None else seconds,
                connections=4 if connections is None else connections,
                outstanding=8 if outstanding is None else outstanding,
                max_messages=pull_batch,
                header=kind,
            )
        else:
            plan = SendPlan(
                seconds=5.0 if seconds is None else seconds,
                warm_up_seconds=warm_up,
                size=size,
                batch=batch,
                connections=8 if connections is None else connections,
                outstanding=32 if outstanding is None else outstanding,
                rate=rate,
                has_keys=keys,
                header=kind,
                polls=poll,
            )
        if topics > 1 and workload is not Workload.SEND:
            raise ConfigError(f"{workload} works on one topic: leave --topics out")
        target = run_loop(
            find_target(
                topic=topic, queues=queues, topics=topics, namesrv=namesrv, broker=broker, server_pid=server_pid
            )
        )
        if isinstance(plan, PullPlan):
            report = pull_load(target, plan)
        else:
            report = (send_load if workload is Workload.SEND else end_to_end)(target, plan)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    print_answer(
        Answer({"broker": target.address, "topic": topic, **report.as_json()}, _parts(target, report)), as_json=json
    )


def _parts(target: Target, report: LoadReport) -> list[Table | str]:
    lines = [
        f"{report.workload}: {report.messages:,} messages in {report.seconds:.2f} s to {target.address}",
        f"rate             {report.rate:,.0f} messages/s",
        f"generator CPU    {report.own_cpu_micros:.2f} µs a message",
    ]
    if report.server_cpu_micros is None:
        lines.append("server CPU       unknown: name the process with --server-pid")
    else:
        assert target.server is not None
        lines.append(f"server CPU       {report.server_cpu_micros:.2f} µs a message (process {target.server.pid})")
        resident, private = report.server_resident_bytes or 0, report.server_private_bytes or 0
        lines.append(f"server memory    {resident / 1e6:.0f} MB resident, {private / 1e6:.0f} MB of it private")
        if report.own_cpu_micros > report.server_cpu_micros * _ENOUGH and report.server_cpu_micros:
            share = report.own_cpu_micros / report.server_cpu_micros
            lines.append(f"note             the generator needs {share:.0%} of the CPU that the server needs")
    for code, count in report.refused.items():
        lines.append(f"refused          {count:,} requests with {code}")
    rows: list[dict[str, Any]] = [
        {"what": name, **{key: getattr(latency, key) for key in ("mean", "p50", "p90", "p99", "p999", "max")}}
        for name, latency in report.latency.items()
    ]
    return ["\n".join(lines) + "\n", Table(_COLUMNS, rows)]


def _millis(value: float) -> str:
    return f"{value:.3f}"


_COLUMNS = [
    Column("latency, ms", "what"),
    *(Column(name, key, _millis) for name, key in (("mean", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))),
    Column("p99.9", "p999", _millis),
    Column("max", "max", _millis),
]
