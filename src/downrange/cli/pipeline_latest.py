"""`downrange pipeline latest`: the newest message per key of topics as a Delta table."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.options import Json, Namesrv, key_values
from downrange.cli.output import Answer, print_answer
from downrange.cli.pipeline import Master, Options, StorageOptions
from downrange.cli.spark_session import asked_rightly, shown_line, spark_session, stopped_by_signal

if TYPE_CHECKING:
    from downrange.spark.pipelines.latest import LatestProgress


def latest(
    table: Annotated[
        str, typer.Argument(metavar="TABLE", help="Directory or URL of the table: s3://…, gs://…, abfss://….")
    ],
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC…", help="Topics whose keys are kept.")],
    delete_tag: Annotated[
        str | None, typer.Option("--delete-tag", help="Messages with this tag delete their keys, as empty bodies do.")
    ] = None,
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on after catching up, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between batches, with --continuous.")] = 10.0,
    name: Annotated[str, typer.Option("--name", help="Name of this pipeline in `pipeline list`.")] = "latest",
    options: Options = None,
    storage: StorageOptions = None,
    namesrv: Namesrv = None,
    master: Master = None,
    json: Json = False,
) -> None:
    """Keep the newest message of each key in a Delta table. An empty body deletes its key. The next run continues."""
    source = {**key_values(options or []), "subscribe": ",".join(topics)}
    if namesrv is not None:
        source["namesrv"] = namesrv
    with asked_rightly():
        from downrange.spark.lake.location import Location
        from downrange.spark.pipelines.latest import checked
        from downrange.spark.pipelines.latest import latest as run
        from downrange.spark.source import check_source

        wanted = checked(source, every, name=name)  # before Spark, which takes seconds to start
        place = Location.of(table, key_values(storage or []))
        check_source(wanted)
        began = time.monotonic()
        with spark_session(master) as spark, shown_line() as show, stopped_by_signal() as stop:

            def on_progress(progress: LatestProgress) -> None:
                show(f"read {progress.messages:,} messages, {progress.behind or 0:,} to go", progress.messages)

            done = run(
                spark,
                place.url,
                source,
                storage_options=place.storage_options,
                delete_tag=delete_tag,
                name=name,
                until_caught_up=not continuous,
                seconds_between_batches=every,
                on_progress=on_progress,
                stop=stop,
            )
    seconds = time.monotonic() - began
    text = (
        f"read {done.messages:,} messages in {seconds:.1f} s: {done.inserted:,} new keys, {done.updated:,} updated, "
        f"{done.deleted:,} deleted"
    )
    if done.keyless:
        text += f"; {done.keyless:,} messages have no key"
    print_answer(Answer({"table": table, **asdict(done), "seconds": round(seconds, 3)}, [text]), as_json=json)
