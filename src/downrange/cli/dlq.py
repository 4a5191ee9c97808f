"""`downrange dlq …`: dead letters of a consumer group."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import ask, shows
from downrange.cli.options import DryRun, Group, Namesrv, UsageError, command_family
from downrange.cli.output import Answer, Column, Table, one_line, print_answer
from downrange.cli.times import parse_time, time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.dead_letters import DeadLetter, Resent

app = command_family("Dead letters: messages that a consumer group gave up.")

Begin = Annotated[str | None, typer.Option("--begin", help="Given up at this time or later.")]
End = Annotated[str | None, typer.Option("--end", help="Given up at this time or earlier.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only the message with this id; any number of them.")]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most this many.")]

COLUMNS = (
    Column("MsgId", "msgId"),
    Column("Topic", "originTopic"),
    Column("Tags", "tags"),
    Column("Keys", "keys"),
    Column("Times", "reconsumeTimes"),
    Column("Given Up", "storeTimestamp", time_text),
    Column("Broker", "brokerName"),
    Column("Offset", "queueOffset"),
    Column("Resent", "resent"),
)


def _span(begin: str | None, end: str | None, ids: list[str] | None, limit: int | None) -> dict[str, Any]:
    return {
        "begin": None if begin is None else parse_time(begin),
        "end": None if end is None else parse_time(end),
        "message_ids": frozenset(ids or ()),
        "limit": limit,
    }


@app.command("list")
@shows
async def list_letters(
    admin: Admin, group: Group, begin: Begin = None, end: End = None, ids: Ids = None, limit: Limit = 100
) -> Answer:
    """Show the dead letters of a group."""
    from downrange.client.dead_letters import DeadLetters

    letters = DeadLetters(admin.session, group)
    rows = [letter.document() async for letter in letters.read(**_span(begin, end, ids, limit))]
    total = await letters.count()
    parts: list[Table | str] = [Table(COLUMNS, rows)] if total else []
    parts.append(f"{len(rows)} of {total} dead letters of {group}" if total else f"{group} has no dead letters")
    return Answer({"group": group, "total": total, "letters": rows}, parts)


@app.command("export")
def export(
    group: Group,
    file: Annotated[Path, typer.Option("--file", "-f", help="Write to this file; - is standard output.")] = Path("-"),
    begin: Begin = None,
    end: End = None,
    ids: Ids = None,
    limit: Limit = None,
    namesrv: Namesrv = None,
) -> None:
    """Write dead letters as JSON lines, each a whole message with all its fields."""
    chosen = _span(begin, end, ids, limit)

    async def action(admin: Admin) -> int:
        from downrange.cli.progress import progress
        from downrange.client.dead_letters import DeadLetters

        letters = DeadLetters(admin.session, group)
        total = min(await letters.count(), limit or sys.maxsize)
        with progress("exported", total, shares_terminal=str(file) == "-") as shown:

            async def counted() -> AsyncIterator[DeadLetter]:
                async for letter in letters.read(**chosen):
                    yield letter
                    shown.add()

            if str(file) == "-":
                return await letters.export(counted(), sys.stdout)
            try:
                with file.open("w", encoding="utf-8") as target:
                    return await letters.export(counted(), target)
            except OSError as error:
                raise UsageError(f"cannot write {file}: {error.strerror or error}") from None

    count = ask(namesrv, action)
    typer.echo(f"exported {count} dead letters of {group}", err=True)


@app.command("resend")
def resend(
    group: Group,
    topic: Annotated[
        str | None,
        typer.Option("--topic", "-t", help="Send to this topic, for all its groups, instead of to this group alone."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send dead letters that were sent again before, too.")] = False,
    begin: Begin = None,
    end: End = None,
    ids: Ids = None,
    limit: Limit = None,
    rate: Annotated[float | None, typer.Option("--rate", min=0.01, help="At most this many a second.")] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal", help="Note each sent message in this file; after a crash the same command continues from it."
        ),
    ] = None,
    dry_run: DryRun = False,
    namesrv: Namesrv = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object for each message.")] = False,
) -> None:
    """Send dead letters again, to this group alone. Each message gets all its retries again."""
    chosen = _span(begin, end, ids, limit)

    async def action(admin: Admin) -> list[dict[str, Any]]:
        from downrange.cli.progress import progress
        from downrange.client.dead_letters import DeadLetters, Resent
        from downrange.client.resending import JournalFile, Pace

        letters = DeadLetters(admin.session, group)
        rows = []
        with progress("sent", shares_terminal=json) as shown, ExitStack() as stack:
            notes = None if journal is None else stack.enter_context(JournalFile(journal))
            noted = frozenset(notes.noted) if notes is not None else frozenset()
            found = letters.read(include_resent=again or bool(ids), noted=noted, **chosen)
            planned = (Resent(letter) async for letter in found)
            pace = Pace(admin.session.clock, rate)
            async for outcome in planned if dry_run else letters.resend(found, topic, pace=pace, journal=notes):
                row = _outcome_row(outcome)
                rows.append(row)
                shown.add()
                if json:
                    print(json_text.dumps(row, ensure_ascii=False))
        return rows

    rows = ask(namesrv, action)
    failed = sum(row["outcome"] == "failed" for row in rows)
    if not json:
        columns = [*COLUMNS[:-1], Column("Outcome", "outcome"), Column("New MsgId", "newOffsetMsgId")]
        parts: list[Table | str] = [Table(columns, rows)] if rows else []
        done = "would be sent" if dry_run else "sent"
        parts.append(f"{len(rows) - failed} dead letters {done} again, {failed} failed")
        print_answer(Answer({}, parts), as_json=False)
    for row in rows:
        if row["error"]:
            typer.echo(f"downrange: {row['msgId']}: {row['error']}", err=True)
    if failed:
        raise typer.Exit(1)


def _outcome_row(outcome: Resent) -> dict[str, Any]:
    document = outcome.letter.document()
    row = {column.key: document.get(column.key) for column in COLUMNS[:-1]}
    state = "sent" if outcome.offset_message_id else "failed" if outcome.error else "to be sent"
    return {
        **row,
        "outcome": state,
        "newOffsetMsgId": outcome.offset_message_id,
        "error": one_line(outcome.error) if outcome.error else None,
    }
