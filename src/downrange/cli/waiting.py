"""`downrange message delayed` and `downrange message half`: messages that no consumer can see yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import shows
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin

OfTopic = Annotated[str | None, typer.Option("--topic", "-t", help="Only messages for this topic.")]


@shows
async def delayed(
    admin: Admin,
    topic: OfTopic = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=10_000, help="At most this many messages of each broker.")
    ] = 100,
) -> Answer:
    """Show waiting delayed messages. The message that is due next comes first."""
    waiting = await admin.delayed.waiting(topic, limit=limit)
    rows: list[dict[str, Any]] = [
        {
            "broker": broker.name,
            "topic": one.topic,
            "msgId": one.message.message_id,
            "level": one.level,
            "due": one.due,
            "storeTimestamp": one.message.store_timestamp,
        }
        for broker, found in waiting.done.items()
        for one in found.soonest
    ]
    levels = [
        {"broker": broker.name, "level": one.level, "delayMillis": one.delay_millis, "count": one.count}
        for broker, found in waiting.done.items()
        for one in found.levels
    ]
    timed = [
        {"broker": broker.name, "topic": name, "count": count}
        for broker, found in waiting.done.items()
        for name, count in (found.timed or {}).items()
    ]
    total = sum(found.count for found in waiting.done.values())
    columns = [
        Column("Due", "due", time_text),
        Column("Topic", "topic"),
        Column("Message ID", "msgId"),
        Column("Level", "level", lambda level: "timer" if level is None else str(level)),
        Column("Broker Name", "broker"),
    ]
    rows.sort(key=lambda row: row["due"])
    document = {"total": total, "levels": levels, "timed": timed, "messages": rows}
    return Answer(document, [Table(columns, rows), f"{len(rows)} of {total} delayed messages"], waiting.failed)


@shows
async def half(
    admin: Admin,
    topic: OfTopic = None,
) -> Answer:
    """Show half messages: transactions that were neither committed nor rolled back."""
    waiting = await admin.transactions.open(topic)
    rows = [
        {
            "broker": broker.name,
            "topic": one.topic,
            "msgId": one.message.message_id,
            "producerGroup": one.producer_group,
            "checks": one.checks,
            "since": one.since,
        }
        for broker, found in waiting.done.items()
        for one in found.messages
    ]
    columns = [
        Column("Since", "since", time_text),
        Column("Topic", "topic"),
        Column("Message ID", "msgId"),
        Column("Producer Group", "producerGroup"),
        Column("Checks", "checks"),
        Column("Broker Name", "broker"),
    ]
    unsure = [broker.name for broker, found in waiting.done.items() if not found.is_certain]
    parts: list[Table | str] = [Table(columns, rows), f"{len(rows)} half messages"]
    if unsure:
        parts.append(
            f"{', '.join(unsure)}: those rolled back since the last check are among them, for 4.x does not say"
        )
    return Answer({"messages": rows, "uncertain": unsure}, parts, waiting.failed)
