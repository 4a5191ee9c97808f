"""What no consumer can see yet: delayed messages, and half messages of open transactions. Asked for now."""

from __future__ import annotations

import asyncio
from typing import Any, Final
from urllib.parse import urlencode

from downrange.client.admin.delayed import DelayedMessage
from downrange.client.admin.transactions import HalfMessage
from downrange.console.formats import span
from downrange.console.pages import Page
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.tables import Column, listing
from downrange.console.views.shared import command
from downrange.model.errors import MQError
from downrange.model.text import Text, said_by
from downrange.model.topics import CHECK_MAX_TIME_TOPIC

SECONDS: Final = 8.0  # longer than one request may take: what other brokers answered is shown


async def delayed(visit: Visit) -> Answer:
    topic = visit.query.get("topic") or None
    try:
        async with asyncio.timeout(SECONDS):
            answers = await visit.admin.delayed.waiting(topic)
    except TimeoutError:
        raise PageRefused(504, Text("brokers did not answer within {seconds:g} s", seconds=SECONDS)) from None
    levels = [
        {"broker": broker.name, "level": level.level, "delay": level.delay_millis, "count": level.count}
        for broker, found in answers.done.items()
        for level in found.levels
    ]
    timed = [
        {"broker": broker.name, "topic": name, "count": count}
        for broker, found in answers.done.items()
        for name, count in (found.timed or {}).items()
    ]
    soonest = [(broker.name, one) for broker, found in answers.done.items() for one in found.soonest]
    columns: list[Column[tuple[str, DelayedMessage]]] = [
        Column("due", Text("due"), lambda row: row[1].due, "exact"),
        Column("topic", Text("topic"), lambda row: row[1].topic, link=lambda row: visit.url("topics", row[1].topic)),
        Column(
            "message", Text("message"), lambda row: row[1].message.message_id, "code",
            link=lambda row: _address(visit, row[1].message.message_id, row[1].topic),
        ),
        Column("how", Text("how"), _how),
        Column("stored", Text("sent"), lambda row: row[1].message.born_timestamp, "exact"),
        Column("tag", Text("tag"), lambda row: row[1].message.tags or ""),
        Column("keys", Text("keys"), lambda row: " ".join(row[1].message.keys)),
        Column("broker", Text("broker"), lambda row: row[0]),
    ]  # fmt: skip
    table = listing(
        soonest, columns, {"order": "asc", **visit.query}, sort="due", name="delayed", caption=Text("Due soonest"),
        search=lambda row: f"{row[1].topic} {row[1].message.message_id} {row[1].message.keys}",
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    total = sum(found.count for found in answers.done.values())
    late = max((visit.now - one.due for _, one in soonest), default=0)
    data = {
        "total": total,
        "late": max(0, late),
        "levels": levels,
        "timed": timed,
        "rows": table.rows,
        "failed": {str(broker): said_by(error) for broker, error in answers.failed.items()},
    }
    chrome = {"table": table, "spans": span}
    return Page("delayed.html", Text("Delayed"), data, command(visit, "message", "delayed"), chrome=chrome)


def _how(row: tuple[str, DelayedMessage]) -> Text:
    return Text("timer") if row[1].level is None else Text("level {level}", level=row[1].level)


def _address(visit: Visit, message_id: str, topic: str) -> str:
    return visit.url("messages", message_id) + "?" + urlencode({"topic": topic})


async def transactions(visit: Visit) -> Answer:
    try:
        async with asyncio.timeout(SECONDS):
            answers = await visit.admin.transactions.open(visit.query.get("topic") or None)
    except TimeoutError:
        raise PageRefused(504, Text("brokers did not answer within {seconds:g} s", seconds=SECONDS)) from None
    rows = [(broker.name, one) for broker, found in answers.done.items() for one in found.messages]
    columns: list[Column[tuple[str, HalfMessage]]] = [
        Column("since", Text("open since"), lambda row: row[1].since, "exact"),
        Column("age", Text("age"), lambda row: visit.now - row[1].since, "span"),
        Column("topic", Text("topic"), lambda row: row[1].topic, link=lambda row: visit.url("topics", row[1].topic)),
        Column(
            "message", Text("message"), lambda row: row[1].message.message_id, "code",
            link=lambda row: _address(visit, row[1].message.message_id, row[1].topic),
        ),
        Column("group", Text("producer group"), lambda row: row[1].producer_group),
        Column("checks", Text("times asked"), lambda row: row[1].checks, "number",
            title=Text("by the broker, of the producer")),
        Column("broker", Text("broker"), lambda row: row[0]),
    ]  # fmt: skip
    table = listing(
        rows, columns, visit.query, sort="age", name="transactions", caption=Text("Open half messages"),
        search=lambda row: f"{row[1].topic} {row[1].producer_group} {row[1].message.message_id}",
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    given_up = await _given_up(visit)
    data = {
        **table.data(),
        "given_up": given_up,
        "is_certain": all(found.is_certain for found in answers.done.values()),
        "failed": {str(broker): said_by(error) for broker, error in answers.failed.items()},
    }
    chrome = {"table": table, "result": visit.query.get("resumed", "")}
    return Page("transactions.html", Text("Transactions"), data, command(visit, "message", "half"), chrome=chrome)


async def _given_up(visit: Visit) -> list[dict[str, Any]]:
    """Half messages that a broker no longer asks about, the newest hundred."""
    if CHECK_MAX_TIME_TOPIC not in visit.cluster.snapshot.topics:
        return []
    try:
        page = await visit.admin.messages.between(CHECK_MAX_TIME_TOPIC, backwards=True)
    except MQError:
        return []
    return [
        {
            "id": one.message_id,
            "topic": one.properties.get("REAL_TOPIC", ""),
            "group": one.properties.get("PGROUP", ""),
            "at": one.store_timestamp,
        }
        for one in page.messages
    ]


async def resume(visit: Visit) -> Answer:
    """Let the broker ask again about a half message that it had given up."""
    await checked_form(visit)
    message_id = visit.path("id")
    try:
        await visit.admin.messages.resume_check(message_id)
    except MQError as error:
        visit.audit("resume check", "failed", subject=message_id, reason=str(error))
        raise
    visit.audit("resume check", "done", subject=message_id)
    return see_other(visit.url("transactions") + "?" + urlencode({"resumed": message_id}))
