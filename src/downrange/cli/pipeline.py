"""`downrange pipeline …`: bulk work on Spark; each command calls one function of downrange.spark.pipelines."""

from __future__ import annotations

import time
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.account import client_config
from downrange.cli.options import DryRun, Json, Namesrv, UsageError, command_family, key_values
from downrange.cli.output import Answer, Column, Table, cell, print_answer, visible
from downrange.cli.spark_session import asked_rightly, shown_progress, spark_session, stopped_by_signal
from downrange.cli.times import parse_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from downrange.spark.lake.lake import Lake
    from downrange.spark.pipelines.replay_plan import Choice
    from downrange.spark.pipelines.sql import View

app = command_family("Bulk work on Spark: archive topics, replay an archive, run SQL queries, count and draw.")

LakeArgument = Annotated[
    str, typer.Argument(metavar="LAKE", help="Directory or URL of the lake: s3://…, gs://…, abfss://….")
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", help="For the lake's object store, name=value; any number. [environment]"),
]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="More options of the source, name=value; any number of them.")
]
Store = Annotated[
    Path | None,
    typer.Option("--store", help="Read this store directory instead of asking brokers.", show_default=False),
]
Master = Annotated[str | None, typer.Option("--master", help="Where Spark runs: local[4], spark://…, yarn. [local[*]]")]
Begin = Annotated[str | None, typer.Option("--begin", help="Stored at this time or later.")]
End = Annotated[str | None, typer.Option("--end", help="Stored at this time or earlier.")]
TABLE_ROWS = 1000


class OutputForm(Enum):
    """How `sql` shows its result."""

    table = "table"
    json = "json"
    parquet = "parquet"


class OutputMode(Enum):
    """Which rows of a streaming result are shown: see Spark's output modes."""

    append = "append"
    update = "update"
    complete = "complete"


@app.command("archive")
def archive(
    lake: LakeArgument,
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC…", help="Topics to archive.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", help="Topics whose names match this regular expression, also topics that appear later."
        ),
    ] = None,
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on after catching up, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between batches, with --continuous.")] = 10.0,
    compact_after: Annotated[bool, typer.Option("--compact", help="Join small files afterwards.")] = False,
    name: Annotated[str, typer.Option("--name", help="Name of this archive: several may fill one lake.")] = "archive",
    store: Store = None,
    options: Options = None,
    storage: StorageOptions = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Write topics to a lake of Parquet files, every message once. The next run continues where this one ended."""
    source = _source(topics, pattern, store, namesrv, options)
    with asked_rightly():
        from downrange.spark.lake.lake import Lake
        from downrange.spark.pipelines.archive import archive as run
        from downrange.spark.pipelines.archive import checked
        from downrange.spark.source import check_source

        wanted = checked(source, name, every)  # before Spark, which takes seconds to start
        storage_options = key_values(storage or [])
        Lake.create(lake, storage_options)
        check_source(wanted)
        began = time.monotonic()
        with spark_session(master) as spark, shown_progress(began) as shown, stopped_by_signal() as stop:
            done = run(
                spark,
                lake,
                source,
                storage_options=storage_options,
                name=name,
                until_caught_up=not continuous,
                seconds_between_batches=every,
                on_progress=shown,
                stop=stop,
            )
        document: dict[str, Any] = {
            "lake": lake,
            "messages": done.messages,
            "files": done.files,
            "bytes": done.bytes,
            "batches": done.batches,
            "seconds": round(time.monotonic() - began, 3),
        }
        parts = [
            f"archived {done.messages:,} messages into {done.files:,} files ({done.bytes / 1e6:,.1f} MB) "
            f"in {document['seconds']:.1f} s"
        ]
        if compact_after:
            compacted, text = _compacted(_lake(lake, storage), topics or ())
            document |= compacted
            parts.append(text)
    print_answer(Answer(document, parts), as_json=json)


@app.command("compact")
def compact(
    lake: LakeArgument,
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC…", help="Only these topics.")] = None,
    target: Annotated[int, typer.Option("--target", min=1, help="Size of the files to make, in MiB.")] = 64,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Hours that replaced files stay for their readers.")] = 168,
    storage: StorageOptions = None,
    json: Json = False,
) -> None:
    """Join small files of a lake, day by day, sorted by key. Archives may run at the same time."""
    with asked_rightly():
        document, text = _compacted(_lake(lake, storage), topics or (), target << 20, keep)
    print_answer(Answer(document, [text]), as_json=json)


@app.command("check")
def check(lake: LakeArgument, storage: StorageOptions = None, json: Json = False) -> None:
    """Read a whole lake; report missing or damaged files and duplicate messages. Exit code 1: something is wrong."""
    with asked_rightly():
        from downrange.spark.lake.check import problems

        found = _lake(lake, storage)
        wrong = list(problems(found))
        files = found.files()
    document = {"files": len(files), "messages": sum(file.rows for file in files), "problems": wrong}
    verdict = f"{len(wrong)} problems" if wrong else "everything is as the log says"
    text = f"{document['files']:,} files, {document['messages']:,} messages: {verdict}"
    print_answer(Answer(document, [*wrong, text]), as_json=json)
    if wrong:
        raise typer.Exit(1)


@app.command("replay")
def replay(
    lake: LakeArgument,
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC…", help="Topics in the lake. [all]")] = None,
    to: Annotated[str | None, typer.Option("--to", help="Send to this topic.")] = None,
    to_own: Annotated[bool, typer.Option("--to-own", help="Send each message to the topic it came from.")] = False,
    begin: Begin = None,
    end: End = None,
    keys: Annotated[list[str] | None, typer.Option("--key", help="Only messages with this key; repeatable.")] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="Only messages for which this Spark SQL is true: \"tags = 'paid'\".")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="At most this many messages a second.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Send messages that an earlier run sent, too.")] = False,
    dry_run: DryRun = False,
    storage: StorageOptions = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Send messages of a lake to a topic. If the command was stopped, start it again: it continues where it was."""
    if (to is None) is not to_own:
        raise UsageError("say where to send: --to TOPIC, or --to-own for the topics the messages came from")
    with asked_rightly():
        from downrange.model.topics import check_topic_name
        from downrange.spark.pipelines.replay_plan import Choice

        if to is not None:
            check_topic_name(to)
        choice = Choice(
            to,
            tuple(topics or ()),
            None if begin is None else parse_time(begin),
            None if end is None else parse_time(end),
            tuple(keys or ()),
            where,
        )
        found = _lake(lake, storage)
        with spark_session(master) as spark:
            if dry_run:
                answer = _counted(spark, found, choice)
            else:
                answer = _replayed(spark, found, choice, namesrv, rate, again, as_json=json)
    print_answer(answer, as_json=json)


@app.command("sql")
def sql(
    query: Annotated[str, typer.Argument(help="A query in Spark SQL.")],
    topics: Annotated[list[str] | None, typer.Option("--topic", "-t", help="[VIEW=]TOPIC, a view of a topic.")] = None,
    stores: Annotated[list[str] | None, typer.Option("--store", help="[VIEW=]DIR, a view of a store's topics.")] = None,
    lakes: Annotated[list[str] | None, typer.Option("--lake", help="[VIEW=]LAKE, a view of a lake.")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Go on with new messages, until Ctrl-C.")] = False,
    mode: Annotated[OutputMode, typer.Option("--mode", help="Which rows of a stream to show.")] = OutputMode.append,
    until_caught_up: Annotated[
        bool, typer.Option("--until-caught-up", help="With --stream: end when all messages are read.")
    ] = False,
    watermark: Annotated[
        str | None, typer.Option("--watermark", help="With --stream: how long to wait for late messages: `10 seconds`.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="With --stream: name of the stream in `pipeline list`.")] = "sql",
    form: Annotated[OutputForm, typer.Option("--output", help="How to show the result.")] = OutputForm.table,
    to: Annotated[Path | None, typer.Option("--to", help="Where the Parquet files go.")] = None,
    options: Options = None,
    storage: StorageOptions = None,
    namesrv: Namesrv = None,
    master: Master = None,
) -> None:
    """Run a query over topics, store directories and lakes. A table shows the first 1000 rows."""
    if (form is OutputForm.parquet) is not (to is not None):
        raise UsageError("--output parquet and --to DIR go together")
    if watermark is not None and not stream:
        raise UsageError("--watermark belongs to --stream: a query that ends sees all messages")
    more = key_values(options or [])
    with asked_rightly():
        from downrange.spark.pipelines.errors import told_in_one_line
        from downrange.spark.pipelines.seen import as_group
        from downrange.spark.pipelines.sql import ViewKind, checked_watermark, parse_view, start_stream, write_parquet
        from downrange.spark.pipelines.sql import sql as run
        from downrange.spark.progress import LagListener

        views = _views(topics, stores, as_group(more, "sql", name) if stream and topics else more, namesrv)
        views += [parse_view(text, ViewKind.LAKE, key_values(storage or [])) for text in lakes or ()]
        if not views:
            raise UsageError("the query has nothing to read: give --topic, --store or --lake")
        checked_watermark(watermark)
        for view in views:  # before Spark, which takes seconds to start
            view.check()
        with spark_session(master) as spark, told_in_one_line():
            result = run(spark, query, views, streaming=stream, watermark=watermark)
            if stream:
                listener = LagListener(namesrv=client_config(namesrv)) if topics else LagListener()
                spark.streams.addListener(listener)
                running = start_stream(
                    result,
                    on_rows=lambda rows: _print_rows(rows, form),
                    path=to,
                    output_mode=mode.value,
                    until_caught_up=until_caught_up,
                    name=name,
                )
                with closing(listener), stopped_by_signal() as stop:
                    while not stop.is_set() and not running.awaitTermination(1):
                        pass
                running.stop()
                spark.streams.removeListener(listener)
            elif to is not None:
                write_parquet(result, to)
            else:
                _print_rows(result, form)


@app.command("stats")
def stats(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory for Parquet files and pictures.")],
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC…", help="Topics to count.")] = None,
    lake: Annotated[str | None, typer.Option("--lake", help="Count in this lake instead of asking brokers.")] = None,
    store: Store = None,
    pattern: Annotated[str | None, typer.Option("--pattern", help="Topics by regular expression.")] = None,
    window: Annotated[
        str, typer.Option("--window", help="Length of a window: `10 seconds`, `5 minutes`.")
    ] = "1 minute",
    traces: Annotated[bool, typer.Option("--traces/--no-traces", help="Also count sends in the trace topic.")] = True,
    options: Options = None,
    storage: StorageOptions = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Count messages, bytes and latency by window; write them as Parquet and draw them."""
    if lake is not None and (store is not None or pattern is not None):
        raise UsageError("--lake, and --store or --pattern, exclude each other: give one of them")
    source = None if lake is not None else _source(topics, pattern, store, namesrv, options)
    with asked_rightly():
        from downrange.spark.options import parse_options
        from downrange.spark.pipelines.errors import told_in_one_line
        from downrange.spark.pipelines.stats import RESULTS, checked_window, lake_inputs, made_directory, topic_inputs
        from downrange.spark.pipelines.stats import stats as run
        from downrange.spark.source import check_source

        checked_window(window)  # before Spark, which takes seconds to start
        wanted = None if source is None else parse_options(source)
        found = None if lake is None else _lake(lake, storage)
        made_directory(out, RESULTS)
        if wanted is not None:
            check_source(wanted)
        with spark_session(master) as spark, told_in_one_line():
            if found is not None:
                messages, traced = lake_inputs(spark, found, topics or (), traces=traces)
            else:
                assert source is not None
                messages, traced = topic_inputs(spark, source, traces=traces)
            report = run(spark, messages, traced, out, window=window)
    document = {
        "messages": report.messages,
        "bytes": report.bytes,
        "windows": report.windows,
        "sends": report.sends,
        "failedSends": report.failed_sends,
        "written": [str(path) for path in report.written],
    }
    text = f"{report.messages:,} messages, {report.bytes:,} bytes in {report.windows:,} windows"
    if report.sends:
        text += f"; {report.sends:,} traced sends, {report.failed_sends:,} failed"
    print_answer(Answer(document, [text, *(f"wrote {path}" for path in report.written)]), as_json=json)


# --- helpers that the commands share ----------------------------------------------------------------------------------


def _source(
    topics: list[str] | None, pattern: str | None, store: Path | None, namesrv: str | None, options: list[str] | None
) -> dict[str, str]:
    """The options of the source `rocketmq` that the command line gives."""
    source = key_values(options or [])
    if topics:
        source["subscribe"] = ",".join(topics)
    if pattern is not None:
        source["subscribePattern"] = pattern
    if store is not None:
        if not store.is_dir():
            raise UsageError(f"{store} is not a store directory")
        source["storePath"] = str(store.absolute())
        if not topics and pattern is None and "assign" not in source:
            source["subscribePattern"] = ".*"
    elif namesrv is not None:
        source["namesrv"] = namesrv
    if not {name.lower() for name in source} & {"subscribe", "subscribepattern", "assign"}:
        raise UsageError("nothing to read: name topics, or give --pattern or --store")
    return source


def _lake(place: str, storage: list[str] | None) -> Lake:
    from downrange.spark.lake.lake import Lake

    return Lake.open(place, key_values(storage or []))


def _compacted(
    lake: Lake, topics: Any, target_bytes: int | None = None, hours: int | None = None
) -> tuple[dict[str, Any], str]:
    from downrange.spark.lake.compaction import TARGET_BYTES, compact
    from downrange.spark.lake.lake import VACUUM_HOURS

    done = compact(lake, topics, target_bytes=target_bytes or TARGET_BYTES)
    removed = lake.vacuum(hours or VACUUM_HOURS)
    rows = [
        {"path": file.path, "replaced": one.replaced if file is one.files[0] else 0, "messages": file.rows}
        for one in done
        for file in one.files
    ]
    text = f"joined {sum(one.replaced for one in done):,} files into {len(rows):,}, deleted {removed:,} old ones"
    return {"compacted": rows, "deleted": removed}, text


def _counted(spark: SparkSession, lake: Lake, choice: Choice) -> Answer:
    from downrange.spark.pipelines.replay import count

    rows = [one._asdict() for one in count(spark, lake, choice)]
    columns = [
        Column("Topic", "topic"),
        Column("Date", "date"),
        Column("Messages", "messages"),
        Column("Bytes", "bytes"),
    ]
    total = sum(row["messages"] for row in rows)
    table: list[Table | str] = [Table(columns, rows)] if rows else []
    return Answer({"messages": total, "partitions": rows}, [*table, f"{total:,} messages would be sent"])


def _replayed(
    spark: SparkSession,
    lake: Lake,
    choice: Choice,
    namesrv: str | None,
    rate: float | None,
    again: bool,
    *,
    as_json: bool,
) -> Answer:
    from downrange.cli.progress import progress
    from downrange.spark.pipelines.replay import replay

    with progress("sent", shares_terminal=as_json) as shown, stopped_by_signal() as stop:
        report = replay(spark, lake, choice, namesrv, rate=rate, again=again, on_sent=shown.add, stop=stop)
    if stop.is_set():
        typer.echo(f"downrange: interrupted after {report.sent:,} messages; the same command continues there", err=True)
        raise typer.Exit(130)
    if report.was_done:
        text = f"an earlier run sent all {report.sent:,} messages: --again sends them once more"
    else:
        text = f"sent {report.sent_now:,} messages"
        if report.sent > report.sent_now:
            text += f", {report.sent:,} with the runs before"
    return Answer({"sentNow": report.sent_now, "sent": report.sent, "wasDone": report.was_done}, [text])


def _views(topics: list[str] | None, stores: list[str] | None, more: dict[str, str], namesrv: str | None) -> list[View]:
    from downrange.spark.pipelines.sql import ViewKind, parse_view

    over_wire = more if namesrv is None else {"namesrv": namesrv, **more}
    views = [parse_view(text, ViewKind.TOPIC, over_wire) for text in topics or ()]
    return views + [parse_view(text, ViewKind.STORE, more) for text in stores or ()]


def _print_rows(result: DataFrame, form: OutputForm) -> None:
    from downrange.spark.pipelines.sql import json_row, plain

    if form is OutputForm.json:
        for row in result.toLocalIterator():
            print(visible(json_row(row)))
        return
    rows: list[Row] = result.limit(TABLE_ROWS + 1).collect()

    def show(value: object) -> str:
        return cell(plain(value) if isinstance(value, bytes | bytearray) else value)

    columns = [Column(name, name, show) for name in result.columns]
    parts: list[Table | str] = [Table(columns, [row.asDict() for row in rows[:TABLE_ROWS]])]
    if len(rows) > TABLE_ROWS:
        parts.append(f"… more than {TABLE_ROWS:,} rows: --output json or parquet has them all")
    print_answer(Answer({}, parts), as_json=False)
