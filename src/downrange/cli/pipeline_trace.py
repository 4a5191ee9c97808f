"""`downrange pipeline trace`: what traces say about all messages together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from downrange.cli.options import Json, Namesrv, UsageError, key_values
from downrange.cli.output import Answer, print_answer
from downrange.cli.pipeline import Master, Options, Store
from downrange.cli.spark_session import asked_rightly, spark_session, stopped_by_signal


def trace(
    out: Annotated[str, typer.Argument(metavar="OUT", help="Directory for Parquet files and pictures.")],
    topic: Annotated[str, typer.Option("--topic", "-t", help="Trace topic.")] = "RMQ_SYS_TRACE_TOPIC",
    lake: Annotated[str | None, typer.Option("--lake", help="Read traces that were archived to this lake.")] = None,
    store: Store = None,
    window: Annotated[
        str, typer.Option("--window", help="Length of a window: `10 seconds`, `5 minutes`.")
    ] = "1 minute",
    stream: Annotated[bool, typer.Option("--stream", help="Go on with new traces, until Ctrl-C.")] = False,
    watermark: Annotated[
        str, typer.Option("--watermark", help="With --stream: how late traces may come.")
    ] = "10 minutes",
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="With --stream: end when all messages are read.")
    ] = False,
    name: Annotated[str, typer.Option("--name", help="Name of this stream.")] = "trace",
    options: Options = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Join traces to sends and deliveries: percentiles, failures and the slowest messages; tables and pictures."""
    if stream and (lake is not None or store is not None):
        raise UsageError("--stream reads from brokers: leave out --lake and --store")
    if lake is not None and store is not None:
        raise UsageError("--lake and --store exclude each other: give one of them")
    source = {**key_values(options or []), "subscribe": topic}
    if store is not None:
        source["storePath"] = str(store.absolute())
    elif namesrv is not None:
        source["namesrv"] = namesrv
    with asked_rightly():
        from downrange.spark.lake.lake import Lake
        from downrange.spark.pipelines.errors import told_in_one_line
        from downrange.spark.pipelines.frames import lake_frame
        from downrange.spark.pipelines.stats import checked_window, made_directory
        from downrange.spark.pipelines.trace import RESULTS, checked, stream_trace
        from downrange.spark.pipelines.trace import trace as run
        from downrange.spark.pipelines.trace_events import trace_frame
        from downrange.spark.source import check_source

        wanted = checked(source, window)  # before Spark, which takes seconds to start
        checked_window(watermark)
        if lake is None:
            check_source(wanted)
        if stream:
            with spark_session(master) as spark, stopped_by_signal() as stop:
                read = stream_trace(
                    spark,
                    source,
                    out,
                    name=name,
                    window=window,
                    watermark=watermark,
                    until_caught_up=until_caught_up,
                    on_progress=_shown(),
                    stop=stop,
                )
            answer = Answer({"read": read, "written": [f"{out}/latency"]}, [f"read {read:,} trace messages"])
        else:
            archived = None if lake is None else Lake.open(lake)
            made_directory(Path(out), RESULTS)
            with spark_session(master) as spark, told_in_one_line():
                traces = trace_frame(spark, source) if archived is None else lake_frame(spark, archived, [topic])
                report = run(spark, traces, Path(out), window=window)
            document = {
                "messages": report.messages,
                "sends": report.sends,
                "deliveries": report.deliveries,
                "failedDeliveries": report.failed_deliveries,
                "unfinished": report.unfinished,
                "written": [str(path) for path in report.written],
            }
            text = (
                f"{report.messages:,} messages: {report.sends:,} sends, {report.deliveries:,} deliveries, "
                f"{report.failed_deliveries:,} of them failed, {report.unfinished:,} without an end"
            )
            answer = Answer(document, [text, *(f"wrote {path}" for path in report.written)])
    print_answer(answer, as_json=json)


def _shown() -> Callable[[int, int | None], None]:
    """Shows the progress of a stream: a line for each new count."""
    last = -1

    def show(read: int, behind: int | None) -> None:
        nonlocal last
        if read != last:
            last = read
            sys.stderr.write(f"read {read:,} trace messages{'' if behind is None else f', {behind:,} to go'}\n")

    return show
