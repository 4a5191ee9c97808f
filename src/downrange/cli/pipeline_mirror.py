"""`downrange pipeline mirror`: topics of one cluster to another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.options import DryRun, Json, UsageError, key_values
from downrange.cli.output import Answer, Column, Table, print_answer
from downrange.cli.pipeline import Master, Options
from downrange.cli.spark_session import asked_rightly, shown_line, spark_session, stopped_by_signal

if TYPE_CHECKING:
    from downrange.spark.pipelines.mirror import MirrorPlan, MirrorProgress


def mirror(
    topics: Annotated[list[str] | None, typer.Argument(metavar="TOPIC…", help="Topics to mirror.")] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern", help="Topics whose names match this regular expression, also topics that appear later."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Name servers of the source. [$NAMESRV_ADDR, else 127.0.0.1:9876]")
    ] = None,
    target: Annotated[str | None, typer.Option("--to", help="Name servers of the target.")] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", help="Directory or URL for the progress of this mirror alone."),
    ] = None,
    groups: Annotated[
        list[str] | None, typer.Option("--group", "-g", help="Carry over the offsets of this group; repeatable.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of this mirror.")] = "mirror",
    from_cluster: Annotated[
        str | None, typer.Option("--from-cluster", help="Name of the source cluster. [its own name]")
    ] = None,
    to_cluster: Annotated[
        str | None, typer.Option("--to-cluster", help="Name of the target cluster. [its own name]")
    ] = None,
    continuous: Annotated[bool, typer.Option("--continuous", help="Go on after catching up, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between batches, with --continuous.")] = 1.0,
    batch: Annotated[int, typer.Option("--batch", help="The most messages of one batch.")] = 20_000,
    options: Options = None,
    target_options: Annotated[
        list[str] | None, typer.Option("--to-option", help="More options of the sink, name=value; any number of them.")
    ] = None,
    dry_run: DryRun = False,
    master: Master = None,
    json: Json = False,
) -> None:
    """Copy topics to another cluster, unchanged and in order, and let groups continue there. The next run continues."""
    if target is None or checkpoint is None:
        raise UsageError(f"say {'where to: --to NAMESRV' if target is None else 'where to remember: --checkpoint DIR'}")
    chosen = key_values(options or [])
    chosen |= {"subscribe": ",".join(topics)} if topics else {}
    chosen |= {} if pattern is None else {"subscribePattern": pattern}
    chosen |= {} if source is None else {"namesrv": source}
    with asked_rightly():
        from downrange.spark.pipelines.mirror import mirror as run
        from downrange.spark.pipelines.mirror import plan
        from downrange.spark.pipelines.mirror_clusters import Mirror, checked
        from downrange.spark.source import check_source

        wanted = Mirror(
            chosen,
            {**key_values(target_options or []), "namesrv": target},
            checkpoint,
            name,
            from_cluster,
            to_cluster,
            tuple(groups or ()),
            batch,
        )
        reading, _ = checked(wanted, every)  # before Spark, which takes seconds to start
        check_source(reading)
        if dry_run:
            print_answer(_planned(plan(wanted)), as_json=json)
            return
        began = time.monotonic()
        with spark_session(master) as spark, _shown(began) as shown, stopped_by_signal() as stop:
            done = run(
                spark,
                wanted,
                until_caught_up=not continuous,
                seconds_between_batches=every,
                on_progress=shown,
                stop=stop,
            )
    seconds = round(time.monotonic() - began, 3)
    document = {
        "read": done.read,
        "mirrored": done.mirrored,
        "bytes": done.bytes,
        "batches": done.batches,
        "groupQueues": done.group_queues,
        "lag": done.lag or {},
        "seconds": seconds,
    }
    text = f"mirrored {done.mirrored:,} messages in {seconds:.1f} s"
    if done.read > done.mirrored:
        text += f"; {done.read - done.mirrored:,} had been at the target before"
    if groups:
        text += f"; offsets of {', '.join(groups)} moved in {done.group_queues:,} queues"
    print_answer(Answer(document, [text]), as_json=json)


def _planned(found: MirrorPlan) -> Answer:
    topics = [one._asdict() for one in found.topics]
    places = [
        {
            "group": place.group,
            "topic": place.queue.topic,
            "queue": f"{place.queue.broker_name} {place.queue.queue_id}",
            "committed": place.committed,
            "target": f"{place.target.broker_name} {place.target.queue_id}",
            "targetOffset": place.target_offset,
            "moves": place.is_ahead,
        }
        for place in found.groups
    ]
    columns = [
        Column("Topic", "topic"),
        Column("Broker", "broker"),
        Column("Queues", "queues"),
        Column("Messages", "messages"),
        Column("To", "target_broker"),
        Column("Has Queues", "target_queues"),
        Column("Needs", "needed_queues"),
    ]
    parts: list[Table | str] = [Table(columns, topics)]
    if places:
        titles = ("Group", "Topic", "Queue", "Committed", "Target", "Target Offset", "Moves")
        parts.append(Table([Column(title, key) for title, key in zip(titles, places[0], strict=True)], places))
    total = sum(one.messages for one in found.topics)
    parts.append(f"{total:,} messages would go from {found.path[0]} to {found.path[1]}")
    document = {"from": found.path[0], "to": found.path[1], "messages": total, "topics": topics, "groups": places}
    return Answer(document, parts)


@contextmanager
def _shown(began: float) -> Iterator[Callable[[MirrorProgress], None]]:
    """Show the progress of a mirror."""
    with shown_line() as show:

        def show_mirrored(progress: MirrorProgress) -> None:
            behind = "" if progress.behind is None else f", {progress.behind:,} to go"
            rate = progress.mirrored / max(time.monotonic() - began, 1e-9)
            show(f"mirrored {progress.mirrored:,} messages, {rate:,.0f}/s{behind}", progress.read)

        yield show_mirrored
