"""`downrange pipeline list` and `downrange pipeline status`: what running pipelines tell about themselves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import time_text
from downrange.settings import camel_case

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.pipeline_status import PipelineStatus

_COLUMNS = (
    Column("Told", "timestamp", time_text),
    Column("Behind", "behind"),
    Column("Rows/s", "rowsPerSecond"),
    Column("Bytes/s", "bytesPerSecond"),
    Column("Batch (s)", "batchSeconds"),
    Column("Last Error", "lastError"),
)


@asks
async def list_pipelines(admin: Admin) -> Answer:
    """List the pipelines that reported progress within a day."""
    rows = [_row(status) for status in await admin.pipelines.list()]
    columns = [Column("Name", "name"), Column("Kind", "kind"), Column("Target", "target"), *_COLUMNS]
    parts: list[Table | str] = [Table(columns, rows)] if rows else ["no pipeline has told its progress"]
    return Answer({"pipelines": rows}, parts)


@asks
async def show_status(
    admin: Admin,
    name: Annotated[str, typer.Argument(help="Name of the query or the archive.")],
    most: Annotated[int, typer.Option("--max", min=1, max=1000, help="At most this many reports.")] = 20,
) -> Answer:
    """Show the reports of one pipeline after its last batches."""
    told = await admin.pipelines.status(name, most=most)
    last = told[-1]
    rows = [_row(status) for status in told]
    lag = "".join(f"\n  {topic}: {behind:,} behind" for topic, behind in sorted(last.lag.items()))
    head = f"{last.name} ({last.kind}): {last.source or '?'} to {last.target or '?'}{lag}"
    return Answer({"name": name, "reports": rows}, [head, Table(_COLUMNS, rows)])


def _row(status: PipelineStatus) -> dict[str, Any]:
    return {**{camel_case(name): value for name, value in asdict(status).items()}, "behind": status.behind}
