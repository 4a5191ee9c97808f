"""Messages: search by topic and time, one message with the verdict of each group, and what can be done with one."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import JSONResponse

from downrange.client.admin.fate import MessageFate
from downrange.client.admin.search import SearchCursor, SearchPage
from downrange.client.admin.timeline import Event
from downrange.client.admin.verdicts import Verdict
from downrange.client.compression import plain_body
from downrange.client.consumer.messages import ReceivedMessage
from downrange.client.message_document import message_document
from downrange.console import body_views
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, download, see_other
from downrange.console.snapshot import kind_of
from downrange.console.users_file import Role
from downrange.console.views.shared import command, crumb
from downrange.console.views.trace import lanes_of
from downrange.console.words import word
from downrange.model.errors import MessageError, MQError
from downrange.model.message import StoredMessage
from downrange.model.sql.errors import SqlError
from downrange.model.sql.expression import compile_sql
from downrange.model.text import Text, as_is, said_by

FATE_SECONDS: Final = 8.0  # longer than one request may take: what other brokers answered is shown
SHOWN_TOPICS: Final = 2000


def mask_of(visit: Visit) -> re.Pattern[str] | None:
    mask = visit.console.config.access.mask
    return re.compile(mask) if mask is not None and visit.is_masked else None


def check_filters(visit: Visit, sql: str, text: str) -> None:
    """Refuse filters that would tell a viewer what is masked."""
    mask = mask_of(visit)
    if mask is not None and text:
        raise PageRefused(403, Text("values are masked for your role, so that bodies cannot be searched"))
    if mask is not None and sql and any(mask.search(word) for word in re.findall(r"\w+", sql)):
        raise PageRefused(403, Text("the expression names a property that is masked for your role"))


async def check_sql(visit: Visit) -> Answer:
    """Whether an SQL92 expression is right, while it is typed: the page shows the error, so it is in its language."""
    try:
        compile_sql(visit.query.get("sql", ""))
    except SqlError as error:
        return JSONResponse({"error": visit.language.say(said_by(error)), "position": error.position})
    except MQError as error:
        return JSONResponse({"error": visit.language.say(said_by(error))})
    return JSONResponse({"error": None})


def topic_names(visit: Visit) -> list[str]:
    """Topics to choose from: those of users first."""
    names = sorted(visit.cluster.snapshot.topics, key=lambda name: (kind_of(name) != "topic", name))
    return names[:SHOWN_TOPICS]


async def messages(visit: Visit) -> Answer:
    query = visit.query
    topic = query.get("topic", "").strip()
    found: SearchPage | None = None
    error = Text("")
    if topic:
        try:
            found = await _search(visit, topic)
        except MQError as failure:
            error = said_by(failure)
    mask = mask_of(visit)
    rows = [message_row(visit, one, mask) for one in found.messages] if found is not None else []
    data: dict[str, Any] = {
        "topic": topic,
        "rows": rows,
        "error": error,
        "looked_at": found.looked_at if found is not None else 0,
        "filtered_here": found.filtered_here if found is not None else False,
        "is_last": found.is_last if found is not None else True,
        "failed": {str(queue): said_by(problem) for queue, problem in found.failed.items()}
        if found is not None
        else {},
    }
    chrome = {
        "topics": topic_names(visit),
        "fields": {name: query.get(name, "") for name in ("from", "to", "tag", "sql", "text")},
        "newer": _page_address(visit, found, backwards=False) if found is not None else "",
        "older": _page_address(visit, found, backwards=True) if found is not None else "",
        "is_newest_first": not query.get("from"),
        "may_search_text": mask is None and visit.console.config.access.show_bodies,
        "may_export": visit.console.config.access.allow_export and mask is None,
    }
    if query.get("format") == "jsonl" and found is not None:
        return _export(visit, topic, found)
    words = ["message", "search", topic or "TOPIC"]
    for option, name in (("--begin", "from"), ("--end", "to"), ("--tag", "tag"), ("--sql", "sql"), ("--text", "text")):
        words += [option, query[name]] if query.get(name) else []
    return Page(
        "messages.html", Text("Messages"), data, command(visit, *words), chrome=chrome, status=400 if error else 200
    )


def _is_backwards(visit: Visit) -> bool:
    """Without a beginning the newest messages come first."""
    return visit.query.get("way", "" if visit.query.get("from") else "back") == "back"


async def _search(visit: Visit, topic: str) -> SearchPage:
    query = visit.query
    check_filters(visit, query.get("sql", ""), query.get("text", ""))
    cursor = SearchCursor.decode(query["cursor"]) if query.get("cursor") else None
    begin, end = visit.time_of("from"), visit.time_of("to")
    optional = {"begin": begin, "end": end, "tags": query.get("tag") or None, "sql": query.get("sql") or None}
    wanted: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    return await visit.admin.messages.between(
        topic, text=query.get("text") or None, cursor=cursor, backwards=_is_backwards(visit), **wanted
    )


def _page_address(visit: Visit, found: SearchPage, *, backwards: bool) -> str:
    """The page before or after; empty where there is none."""
    if backwards == _is_backwards(visit) and found.is_last:
        return ""
    cursor = found.before if backwards else found.after
    return "?" + urlencode({**visit.query, "cursor": cursor.encode(), "way": "back" if backwards else "on"})


def _export(visit: Visit, topic: str, found: SearchPage) -> Answer:
    if not visit.console.config.access.allow_export or mask_of(visit) is not None:
        raise PageRefused(403, Text("messages may not be exported here"))
    visit.audit("export messages", "done", subject=topic, count=len(found.messages))
    lines = "".join(json_text(message_document(one)) + "\n" for one in found.messages)
    return download(lines.encode(), f"{topic}.jsonl", "application/x-ndjson")


def message_row(visit: Visit, one: ReceivedMessage, mask: re.Pattern[str] | None) -> dict[str, Any]:
    """One line of a list of messages."""
    shows = visit.console.config.access.show_bodies and mask is None
    return {
        "stored": one.store_timestamp,
        "id": one.message_id,
        "broker": one.broker_name,
        "queue": one.queue_id,
        "offset": one.queue_offset,
        "tag": one.tags or "",
        "keys": " ".join(one.keys),
        "bytes": len(one.stored_body),
        "body": body_summary(one) if shows else "",
        "address": visit.url("at", one.queue.topic, one.broker_name, str(one.queue_id), str(one.queue_offset)),
    }


def body_summary(one: ReceivedMessage, most: int = 200) -> str:
    try:
        return body_views.summary(one.body, most)
    except MessageError:
        return body_views.summary(one.stored_body, most)


# --- one message ------------------------------------------------------------------------------------------------------


async def message(visit: Visit) -> Answer:
    """A message by its id: unique together with a topic, or an offset id."""
    message_id, topic = visit.path("id"), visit.query.get("topic") or None
    try:
        fate, events = await _life(visit, message_id, topic)
    except MQError:
        return _page(visit, await visit.admin.messages.view(message_id, topic), None, ())
    return _page(visit, fate.message, fate, events)


async def at(visit: Visit) -> Answer:
    """A message by its place in a queue."""
    topic, broker = visit.path("topic"), visit.path("broker")
    queue, offset = visit.path("queue"), visit.path("offset")
    if not queue.isdecimal() or not offset.isdecimal() or len(offset) > 18 or len(queue) > 9:
        raise PageRefused(
            400, Text("queue {queue} and offset {offset} are not both whole numbers", queue=queue, offset=offset)
        )
    found = await visit.admin.messages.by_queue_offset(topic, broker, int(queue), int(offset))
    fate: MessageFate | None = None
    events: tuple[Event, ...] = ()
    if kind_of(topic) == "topic":
        try:
            fate, events = await _life(visit, found.offset_message_id, None)
        except MQError:
            fate = None
    return _page(visit, found, fate, events, broker)


async def _life(visit: Visit, message_id: str, topic: str | None) -> tuple[MessageFate, tuple[Event, ...]]:
    """What became of a message in each group, and its events."""
    messages = visit.admin.messages
    try:
        async with asyncio.timeout(FATE_SECONDS):
            return await asyncio.gather(messages.fate(message_id, topic), messages.timeline(message_id, topic))
    except TimeoutError:
        raise PageRefused(504, Text("brokers did not answer within {seconds:g} s", seconds=FATE_SECONDS)) from None


def _page(
    visit: Visit, found: StoredMessage, fate: MessageFate | None, events: tuple[Event, ...], broker: str = ""
) -> Answer:
    mask = mask_of(visit)
    access = visit.console.config.access
    broker = fate.queue.broker_name if fate is not None else broker
    look = (
        _look(found, mask) if access.show_bodies else body_views.BodyLook(len(found.body), [], [Text("not shown here")])
    )
    chosen = look.view(visit.query.get("view", ""))
    may_copy = mask is None and access.show_bodies and visit.may(Role.OPERATOR)
    verdicts = [_verdict_row(visit, one, found) for one in fate.verdicts] if fate is not None else []
    topic = fate.queue.topic if fate is not None else found.topic
    data = {
        "id": found.message_id,
        "offset_id": found.offset_message_id,
        "topic": topic,
        "tag": found.tags or "",
        "keys": found.keys,
        "bytes": len(found.body),
        "stored": found.store_timestamp,
        "born": found.born_timestamp,
        "born_host": str(found.born_host),
        "store_host": str(found.store_host),
        "broker": broker,
        "queue": fate.queue.queue_id if fate is not None else found.queue_id,
        "offset": int(found.queue_offset),
        "reconsume_times": found.reconsume_times,
        "hidden": word(fate.hidden.why.value) if fate is not None and fate.hidden is not None else "",
        "verdicts": verdicts,
        "is_judged": fate is not None,
        "timeline": lanes_of(events),
        "properties": body_views.masked_properties(found.properties, mask),
        "body": {"view": chosen.name, "text": chosen.text, "is_cut": chosen.is_cut} if chosen is not None else None,
        "body_notes": look.notes,
    }
    chrome = {
        "views": look.names,
        "view": chosen.name if chosen is not None else "",
        "crumbs": [crumb(visit, Text("Messages"), "messages")],
        "self_address": visit.request.url.path + "?" + urlencode({**visit.query, "view": ""}),
        "body_address": visit.url("body", found.message_id) + "?" + urlencode({"topic": topic}),
        "may_download": access.show_bodies and access.allow_export and mask is None,
        "again": visit.url("topics", topic) + "?" + urlencode(_again(found)) if may_copy else "",
        "receivers": _receivers(visit, topic) if visit.may(Role.OPERATOR) else [],
        "result": _handed(visit),
        "has_topic": topic in visit.cluster.snapshot.topics,
    }
    words = ("message", "fate", found.message_id, "-t", topic)
    return Page("message.html", as_is(found.message_id), data, command(visit, *words), chrome=chrome)


def _look(found: StoredMessage, mask: re.Pattern[str] | None) -> body_views.BodyLook:
    try:
        return body_views.look(plain_body(found), mask)
    except MessageError as error:
        look = body_views.look(found.body, mask)
        look.notes.append(said_by(error))
        return look


def _again(found: StoredMessage) -> dict[str, str]:
    """The form of sending, filled with a message; large or binary bodies are left out."""
    reserved = {"TAGS", "KEYS", "UNIQ_KEY", "WAIT", "TRACE_ON", "MSG_REGION", "CLUSTER"}
    try:
        body = plain_body(found).decode("utf-8") if len(found.body) < 4096 else ""
    except (UnicodeDecodeError, MessageError):
        body = ""
    properties = "\n".join(f"{name}={value}" for name, value in found.properties.items() if name not in reserved)
    fields = {"tab": "send", "tags": found.tags or "", "keys": " ".join(found.keys), "properties": properties}
    return {**fields, "body": body}


def _verdict_row(visit: Visit, one: Verdict, found: StoredMessage) -> dict[str, Any]:
    skipped = Text("")
    if one.kind.value == "consumed" and "committed" in one.reason:
        later = [
            entry
            for entry in visit.console.audit.moves_over(visit.cluster.name, one.group)
            if entry["at"] >= found.store_timestamp and entry["outcome"] == "done"
        ]
        if later:
            skipped = Text("or skipped: the group was moved from this console since the message came")
    stack = ""
    if one.member is not None and one.kind.value == "stuck":
        stack = visit.url("groups", one.group, "stack") + "?" + urlencode({"member": one.member})
    return {
        "group": one.group,
        "verdict": word(one.kind.value),
        "reason": one.reason,
        "or": skipped,
        "action": one.action,
        "at": one.at,
        "ahead": one.ahead,
        "seconds": one.seconds,
        "member": one.member,
        "stack": stack,
        "address": visit.url("groups", one.group),
    }


def _receivers(visit: Visit, topic: str) -> list[dict[str, str]]:
    """Members that may be handed the message."""
    return [
        {"group": group.name, "member": member.client_id}
        for group in visit.cluster.snapshot.groups_of(topic)
        for member in group.members.values()
    ][:200]


async def body(visit: Visit) -> Answer:
    """The bytes of a body, as a file."""
    access = visit.console.config.access
    if not access.show_bodies or not access.allow_export or mask_of(visit) is not None:
        raise PageRefused(403, Text("bodies may not be downloaded here"))
    found = await visit.admin.messages.view(visit.path("id"), visit.query.get("topic") or None)
    visit.audit("download body", "done", subject=found.topic, message=found.message_id)
    try:
        content = plain_body(found)
    except MessageError:
        content = found.body
    return download(content, f"{found.message_id}.bin")


async def hand_over(visit: Visit) -> Answer:
    """Hand a message to the callback of one running member."""
    form = await checked_form(visit)
    group, _, member = form.get("receiver", "").partition(" ")
    message_id, topic = visit.path("id"), form.get("topic", "")
    try:
        result = await visit.admin.messages.consume_directly(group, member, message_id, topic or None)
    except MQError as error:
        visit.audit("hand over", "failed", subject=group, message=message_id, member=member, reason=str(error))
        raise
    outcome = str(result.consume_result or "no answer")
    is_done = outcome == "CR_SUCCESS"
    visit.audit("hand over", "done" if is_done else "failed", subject=group, message=message_id, result=outcome)
    said = {"group": group, "member": member, "millis": result.spent_time_mills, "remark": result.remark or ""}
    return see_other(visit.url("messages", message_id) + "?" + urlencode({"topic": topic, "handed": outcome, **said}))


def _handed(visit: Visit) -> Text:
    """What came of handing the message over, from the address; empty when that was not asked for."""
    said = {name: visit.query.get(name, "") for name in ("handed", "group", "member", "millis", "remark")}
    if not said["handed"]:
        return Text("")
    return Text("{member} of {group}: {handed} after {millis} ms {remark}", **{**said, "handed": word(said["handed"])})
