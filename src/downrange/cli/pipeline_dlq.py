"""`downrange pipeline dlq`: the dead letters of all groups as a table, a report, and sending chosen ones again."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.account import client_config
from downrange.cli.options import DryRun, Json, Namesrv, UsageError, key_values
from downrange.cli.output import Answer, Column, Table, print_answer
from downrange.cli.pipeline import Master, Options
from downrange.cli.spark_session import asked_rightly, shown_progress, spark_session, stopped_by_signal
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from downrange.client.config import ClientConfig
    from downrange.client.pipeline_status import PipelineReporter
    from downrange.spark.pipelines.dead_letters import DlqReport
    from downrange.spark.pipelines.resend import Job, Outcome

_CAUSES = (
    Column("Group", "consumerGroup"),
    Column("Topic", "originTopic"),
    Column("Tags", "tags"),
    Column("Consumer Host", "consumerHost"),
    Column("Error", "error"),
    Column("Letters", "letters"),
    Column("Since", "since", time_text),
    Column("Until", "until", time_text),
)
_OUTCOMES = (
    Column("MsgId", "msgId"),
    Column("Group", "group"),
    Column("To", "topic"),
    Column("Broker", "brokerName"),
    Column("Offset", "queueOffset"),
    Column("Outcome", "outcome"),
    Column("New MsgId", "newOffsetMsgId"),
)


def dlq(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for the table, the report and pictures.")],
    resend: Annotated[
        str | None,
        typer.Option("--resend", help="Send letters for which this Spark SQL is true: \"origin_topic = 'orders'\"."),
    ] = None,
    to_own: Annotated[
        bool,
        typer.Option("--to-own", help="Send each letter to its first topic, for all groups, not to its group alone."),
    ] = False,
    rate: Annotated[float | None, typer.Option("--rate", help="Send at most this many a second.")] = None,
    traces: Annotated[
        bool, typer.Option("--traces/--no-traces", help="Look for hosts and errors in the trace topic.")
    ] = True,
    dry_run: DryRun = False,
    options: Options = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Count the dead letters of all groups, and send chosen ones again, each once. If it was stopped, run it again."""
    if resend is None and (to_own or dry_run or rate is not None):
        raise UsageError("--to-own, --rate and --dry-run belong to --resend SQL: say which letters to send")
    source = key_values(options or [])
    if namesrv is not None:
        source["namesrv"] = namesrv
    with asked_rightly():
        from downrange.client.pipeline_status import PipelineReporter
        from downrange.spark.pipelines.dead_letters import checked_source
        from downrange.spark.pipelines.resend import Job

        checked_source(source)  # before Spark, which takes seconds to start
        job = Job(to_own, rate)
        config = client_config(namesrv)
        with closing(PipelineReporter(config)) as reporter, spark_session(master) as spark:
            report = _collected(spark, out, source, traces)
            document, parts = _report_answer(report)
            outcomes: list[Outcome] = []
            if resend is not None:
                planned = _planned(spark, out, source, traces, resend, job)
                outcomes = planned if dry_run else _sent(planned, out, config, job, reporter, as_json=json)
    if resend is not None:
        rows = [_outcome_row(outcome) for outcome in outcomes]
        document["outcomes"] = rows
        parts += [Table(_OUTCOMES, rows)] if rows else []
        parts.append(_counts(rows) if rows else "no dead letter is chosen")
    print_answer(Answer(document, parts), as_json=json)
    failed = [row for row in document.get("outcomes", ()) if row["outcome"] == "failed"]
    for row in failed:
        typer.echo(f"downrange: {row['msgId']}: {row['error']}", err=True)
    if failed:
        raise typer.Exit(1)


def _collected(spark: SparkSession, out: Path, source: dict[str, str], traces: bool) -> DlqReport:
    from downrange.spark.pipelines.dead_letters import dlq as run

    with shown_progress(time.monotonic()) as shown, stopped_by_signal() as stop:
        report = run(spark, out, source, traces=traces, on_progress=shown, stop=stop)
    if stop.is_set():
        typer.echo("downrange: interrupted; the same command continues", err=True)
        raise typer.Exit(130)
    return report


def _planned(
    spark: SparkSession, out: Path, source: dict[str, str], traces: bool, condition: str, job: Job
) -> list[Outcome]:
    from downrange.spark.pipelines.dead_letters import letters_in
    from downrange.spark.pipelines.resend import chosen

    return chosen(letters_in(spark, out, source, traces=traces), condition, job)


def _sent(
    planned: list[Outcome], out: Path, config: ClientConfig, job: Job, reporter: PipelineReporter, *, as_json: bool
) -> list[Outcome]:
    from downrange.cli.progress import progress
    from downrange.client.pipeline_status import PipelineStatus
    from downrange.spark.pipelines.dead_letters import NAME
    from downrange.spark.pipelines.resend import resend

    with (
        progress("sent", len(planned), shares_terminal=as_json) as shown,
        stopped_by_signal() as stop,
    ):

        def on_outcome(_: Outcome) -> None:
            shown.add()
            left = len(planned) - shown.count
            target = "first topics" if job.to_own else "retry topics"
            reporter.tell(PipelineStatus(NAME, NAME, str(out), target, {"%DLQ%": left}, rows_per_second=shown.rate))

        outcomes = resend(planned, out, config, job, on_outcome=on_outcome, stop=stop)
    if stop.is_set() and len(outcomes) < len(planned):
        left = len(planned) - len(outcomes)
        typer.echo(f"downrange: interrupted, {left:,} left; the same command continues", err=True)
        raise typer.Exit(130)
    return outcomes


def _report_answer(report: DlqReport) -> tuple[dict[str, Any], list[Table | str]]:
    rows = [
        {
            "consumerGroup": row["consumer_group"],
            "originTopic": row["origin_topic"],
            "tags": row["tags"],
            "consumerHost": row["consumer_host"],
            "error": row["error"],
            "letters": row["letters"],
            "since": round(row["since"].timestamp() * 1000),
            "until": round(row["until"].timestamp() * 1000),
        }
        for row in report.causes
    ]
    document = {
        "letters": report.letters,
        "new": report.new,
        "causes": rows,
        "written": [str(path) for path in report.written],
    }
    parts: list[Table | str] = [Table(_CAUSES, rows)] if rows else []
    groups = len({row["consumerGroup"] for row in rows})
    parts.append(f"{report.letters:,} dead letters of {groups} groups, {report.new:,} of them new in the table")
    return document, [*parts, *(f"wrote {path}" for path in report.written)]


def _outcome_row(outcome: Outcome) -> dict[str, Any]:
    queue, offset = outcome.place
    return {
        "msgId": outcome.unique_key,
        "group": outcome.group,
        "topic": outcome.topic,
        "brokerName": queue.broker_name,
        "queueId": queue.queue_id,
        "queueOffset": offset,
        "outcome": outcome.fate.value,
        "newOffsetMsgId": outcome.offset_message_id,
        "error": outcome.error,
    }


def _counts(rows: list[dict[str, Any]]) -> str:
    """`3 dead letters: 2 sent, 1 failed`."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    return f"{len(rows):,} dead letters: " + ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())
