"""`downrange simulate`: compare the fault strategies in a simulated cluster."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.options import Json, UsageError
from downrange.cli.output import Answer, Column, Table, print_answer
from downrange.settings import ConfigError

if TYPE_CHECKING:
    from downrange.simulation import Report


class StrategyChoice(StrEnum):
    ALL = "all"
    ROUND_ROBIN = "round_robin"
    LATENCY = "latency"
    ADAPTIVE = "adaptive"


def run(
    producers: Annotated[int, typer.Option(help="Number of producers.")] = 2000,
    brokers: Annotated[int, typer.Option(help="Number of brokers.")] = 200,
    brokers_per_topic: Annotated[int, typer.Option(help="Number of brokers that serve each topic.")] = 8,
    faulty: Annotated[int | None, typer.Option(help="Number of brokers that fail. [one in ten]")] = None,
    rate: Annotated[float, typer.Option(help="Messages that each producer sends a second.")] = 2.0,
    scenario: Annotated[
        str,
        typer.Option(
            help="crash, stopped, silent, brownout, slow-disk, overload, flapping, rolling, all-down, or all of them."
        ),
    ] = "crash",
    strategy: Annotated[StrategyChoice, typer.Option(help="Fault strategy.")] = StrategyChoice.ALL,
    seconds: Annotated[float, typer.Option(help="Simulated seconds; the fault lasts from 1/6 to 1/2 of them.")] = 120.0,
    send_timeout: Annotated[float, typer.Option(help="Time limit of a send with all its attempts, ms.")] = 3000.0,
    attempt_timeout: Annotated[float, typer.Option(help="Time limit of one attempt, ms; 0: none.")] = 1000.0,
    retries: Annotated[int, typer.Option(help="retryTimesWhenSendFailed.")] = 2,
    route_refresh: Annotated[float, typer.Option(help="Seconds between route look-ups.")] = 30.0,
    probes_refresh_route: Annotated[
        bool, typer.Option(help="Look the route up again when a probed broker is no longer in it.")
    ] = True,
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 1,
    json: Json = False,
) -> None:
    """Run fault strategies through failures of a simulated cluster and compare them."""
    from downrange.client.producer.fault import STRATEGIES
    from downrange.simulation import SCENARIOS, Plan, simulate

    try:
        plan = Plan(
            producers=producers,
            brokers=brokers,
            brokers_per_topic=brokers_per_topic,
            faulty=faulty,
            rate_per_producer=rate,
            seconds=seconds,
            send_timeout_millis=send_timeout,
            attempt_timeout_millis=attempt_timeout or None,
            retry_times=retries,
            route_refresh_seconds=route_refresh,
            probes_refresh_route=probes_refresh_route,
            seed=seed,
        )
        scenarios = list(SCENARIOS) if scenario == "all" else [scenario]
        names = list(STRATEGIES) if strategy is StrategyChoice.ALL else [strategy.value]
        reports = [simulate(plan, one, STRATEGIES[name]()) for one in scenarios for name in names]
    except ConfigError as error:
        raise UsageError(str(error)) from None
    parts: list[Table | str] = [
        f"{producers} producers x {rate:g}/s on {brokers} brokers, {len(plan.faulty_brokers)} of them faulty, "
        f"{seconds:g} s, seed {seed}"
    ]
    for one in scenarios:
        rows = [_row(report) for report in reports if report.scenario == one]
        parts += [f"\n{one}: {SCENARIOS[one].summary}", Table(COLUMNS, rows)]
    document = {"plan": asdict(plan), "results": [asdict(report) for report in reports]}
    print_answer(Answer(document, parts), as_json=json)


def _row(report: Report) -> dict[str, Any]:
    return {**asdict(report), "share": f"{report.fault_share:.2%}", "fair": f"{report.fair_share:.2%}"}


def _millis(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


COLUMNS = [
    Column("strategy", "strategy"),
    Column("sends", "sends"),
    Column("acked", "acknowledged"),
    Column("failed", "failed"),
    Column("duplicates", "duplicates"),
    Column("given up", "given_up"),
    Column("attempts", "attempts"),
    Column("probes", "probes"),
    Column("p50 ms", "p50_millis", _millis),
    Column("p99 ms", "p99_millis", _millis),
    Column("fault p99 ms", "fault_p99_millis", _millis),
    Column("max ms", "max_millis", _millis),
    Column("to faulty", "share"),
    Column("(fair)", "fair"),
    Column("s to avoid", "seconds_to_avoid", _seconds),
    Column("s to return", "seconds_to_return", _seconds),
]
