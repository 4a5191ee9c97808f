"""`downrange message search` and `downrange message fate`: which messages there are, and what became of one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from downrange.cli.cluster_actions import asks, shows
from downrange.cli.message import MessageId, OfTopic
from downrange.cli.message_format import Charset, body_of, decoder
from downrange.cli.options import Topic
from downrange.cli.output import Answer, Column, Table, cell
from downrange.cli.times import parse_time, time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin


@asks
async def search(
    admin: Admin,
    topic: Topic,
    begin: Annotated[str | None, typer.Option("--begin", help="Stored at this time or later.")] = None,
    end: Annotated[str | None, typer.Option("--end", help="Stored at this time or earlier.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only these tags: 'A || B'.")] = None,
    sql: Annotated[str | None, typer.Option("--sql", help="Only messages that this SQL92 expression matches.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="Only messages with this text in the body.")] = None,
    backwards: Annotated[
        bool, typer.Option("--backwards", help="Show the newest of these messages, not the oldest.")
    ] = False,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="Continue at this place; the last page printed it.")
    ] = None,
    max_messages: Annotated[int, typer.Option("--max", min=1, max=10_000, help="At most this many.")] = 100,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=600, help="Stop searching after this many seconds.")
    ] = 10,
    body: Annotated[bool, typer.Option("--body/--no-body", help="Add a column with the bodies.")] = False,
    charset: Charset = None,
) -> Answer:
    """Find messages of all queues by the time when they were stored. Shows one page at a time."""
    from downrange.client.admin.search import END_OF_TIME, Budget, SearchCursor
    from downrange.client.message_document import message_document

    page = await admin.messages.between(
        topic,
        0 if begin is None else parse_time(begin),
        END_OF_TIME if end is None else parse_time(end),
        tags=tag,
        sql=sql,
        text=text,
        cursor=None if cursor is None else SearchCursor.decode(cursor),
        backwards=backwards,
        budget=Budget(max_messages, looked_at=10_000_000, seconds=seconds),
    )
    rows = [message_document(message) for message in page.messages]
    if charset is not None:
        decode = decoder(charset)
        rows = [{**row, "body": decode(body_of(one))} for row, one in zip(rows, page.messages, strict=True)]
    go_on = page.before if backwards else page.after
    document = {
        "topic": topic,
        "messages": rows,
        "isLast": page.is_last,
        "before": page.before.encode(),
        "after": page.after.encode(),
        "lookedAt": page.looked_at,
        "filteredHere": page.filtered_here,
    }
    columns = (*_SEARCH_COLUMNS, Column("Body", "body", lambda text: " ".join(cell(text).splitlines())))
    parts: list[Table | str] = [Table(columns if body else _SEARCH_COLUMNS, rows)]
    if page.filtered_here:
        parts.append("the broker cannot evaluate SQL92 (enablePropertyFilter=false): filtered here")
    if not page.is_last:
        parts.append(f"{page.looked_at} messages looked at; more with --cursor {go_on.encode()}")
    failed = {f"{queue.broker_name} queue {queue.queue_id}": error for queue, error in page.failed.items()}
    return Answer(document, parts, failed)


_SEARCH_COLUMNS = (
    Column("Store Timestamp", "storeTimestamp", time_text),
    Column("Message ID", "msgId"),
    Column("Broker Name", "brokerName"),
    Column("QID", "queueId"),
    Column("Offset", "queueOffset"),
    Column("Tags", "tags"),
    Column("Keys", "keys"),
)


@shows
async def fate(admin: Admin, message_id: MessageId, topic: OfTopic = None) -> Answer:
    """Say for each group why it has or has not consumed a message."""
    found = await admin.messages.fate(message_id, topic)
    rows = [
        {
            "group": one.group,
            "verdict": one.kind.value,
            "reason": one.reason,
            "action": one.action or None,
            "time": one.at,
            "ahead": one.ahead,
            "seconds": one.seconds,
            "member": one.member,
        }
        for one in found.verdicts
    ]
    message, queue, hidden = found.message, found.queue, found.hidden
    document = {
        "msgId": message.message_id,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queueId": queue.queue_id,
        "queueOffset": message.queue_offset if hidden is None else None,
        "storeTimestamp": message.store_timestamp,
        "hidden": hidden.why.value if hidden is not None else None,
        "due": hidden.due if hidden is not None else None,
        "groups": rows,
    }
    place = f"{queue.topic}, stored {time_text(message.store_timestamp)} on {queue.broker_name}, queue {queue.queue_id}"
    columns = [
        Column("Group", "group"),
        Column("Verdict", "verdict"),
        Column("Time", "time", time_text),
        Column("Reason", "reason"),
        Column("Next", "action"),
    ]
    state = "" if hidden is None else f"\n{hidden.why}" + (f" until {time_text(hidden.due)}" if hidden.due else "")
    parts: list[Table | str] = [f"{message.message_id}: {place}{state}"]
    parts += [Table(columns, rows)] if rows else [f"no group reads the topic {queue.topic}"]
    return Answer(document, parts, found.failed)
