"""The live tail: the page, and the stream of what comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from downrange.console.languages import Language
from downrange.console.pages import Page
from downrange.console.requests import Answer, PageRefused, Visit
from downrange.console.streams import MOST_OF_ONE, event
from downrange.console.tail import TailFilter, tailing
from downrange.console.views.messages import body_summary, check_filters, mask_of, topic_names
from downrange.console.views.shared import command
from downrange.model.errors import MQError
from downrange.model.sql.expression import compile_sql
from downrange.model.text import Text, plural, said_by

if TYPE_CHECKING:
    from downrange.client.consumer.messages import ReceivedMessage

BODY_CHARACTERS = 300


def _wanted(visit: Visit) -> TailFilter:
    query = visit.query
    wanted = TailFilter(query.get("topic", "").strip(), query.get("tag", "").strip(), query.get("sql", "").strip())
    if wanted.tags and wanted.sql:
        raise PageRefused(400, Text("a tail takes a tag or SQL92, not both: SQL92 knows the tag as TAGS"))
    check_filters(visit, wanted.sql, "")
    return wanted


async def tail_page(visit: Visit) -> Answer:
    error = Text("")
    try:
        wanted = _wanted(visit)
        if wanted.sql:
            compile_sql(wanted.sql)
    except MQError as failure:
        error = said_by(failure)
        wanted = TailFilter(*(visit.query.get(name, "").strip() for name in ("topic", "tag", "sql")))
    owner = f"{visit.who.name} {visit.source}"
    is_full = visit.console.streams.is_full(owner)
    data = {"topic": wanted.topic, "tag": wanted.tags, "sql": wanted.sql, "error": error}
    chrome = {
        "topics": topic_names(visit),
        "stream": visit.url("tail", "events")
        + "?"
        + urlencode({"topic": wanted.topic, "tag": wanted.tags, "sql": wanted.sql}),
        "is_full": is_full and bool(wanted.topic),
        "most": MOST_OF_ONE,
        "place": visit.url("at"),
    }
    words = ["consume", wanted.topic or "TOPIC", "--follow"]
    words += ["--sql", wanted.sql] if wanted.sql else ["--tag", wanted.tags] if wanted.tags else []
    return Page(
        "tail.html", Text("Live tail"), data, command(visit, *words), chrome=chrome, status=400 if error else 200
    )


async def tail_events(visit: Visit) -> Answer:
    wanted = _wanted(visit)
    owner = f"{visit.who.name} {visit.source}"
    if visit.console.streams.is_full(owner):
        raise PageRefused(429, Text("{most} streams are open already; close one of the other tails", most=MOST_OF_ONE))
    if wanted.sql:
        compile_sql(wanted.sql)  # a wrong expression is refused before the stream begins
    shows = visit.console.config.access.show_bodies and mask_of(visit) is None
    session, language = visit.admin.session, visit.language

    async def events() -> AsyncGenerator[str, None]:
        try:
            async with tailing(session, wanted) as tail:
                yield event("open", {"filtered_here": tail.filtered_here})
                while True:
                    batch = await tail.batch()
                    if batch.matched:
                        rows = [_row(one, shows, language) for one in batch.messages]
                        yield event("batch", {"matched": batch.matched, "rows": rows})
        except MQError as error:
            yield event("failed", {"error": visit.language.say(said_by(error))})

    return visit.console.streams.response(owner, events())


def _row(message: ReceivedMessage, shows: bool, language: Language) -> list[Any]:
    """Time, broker, queue, offset, tag, keys, body: short, since there may be 500 a second."""
    return [
        message.store_timestamp,
        message.broker_name,
        message.queue_id,
        str(message.queue_offset),
        message.tags or "",
        " ".join(message.keys),
        body_summary(message, BODY_CHARACTERS)
        if shows
        else language.say(plural(len(message.stored_body), "{count} byte", "{count} bytes")),
    ]
