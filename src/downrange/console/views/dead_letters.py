"""Dead letters: groups that have some, the letters of one group, and jobs that send them again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

from downrange.client.dead_letters import DeadLetter, DeadLetters
from downrange.console import body_views, jobs
from downrange.console.formats import UNKNOWN, parse_time
from downrange.console.jobs import Job
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit, checked_pairs, download, see_other
from downrange.console.snapshot import GroupState
from downrange.console.streams import MOST_OF_ONE, event
from downrange.console.tables import Column, listing, to_csv
from downrange.console.views.messages import body_summary, mask_of
from downrange.console.views.shared import LIVE_SECONDS, command, crumb, unheard
from downrange.console.words import word
from downrange.model.errors import MessageError, MQError
from downrange.model.message import MessageQueue
from downrange.model.text import Text, as_is, plural, said_by

SHOWN: Final = 200
MOST_READ: Final = 20_000
READ_SECONDS: Final = 20.0
TRIAL_SECONDS: Final = 3.0


async def dead_letter_groups(visit: Visit) -> Answer:
    snapshot = visit.cluster.snapshot
    having = [group for group in snapshot.groups.values() if snapshot.dead_letters(group.name)]

    def last(group: GroupState) -> int:
        topic = snapshot.topics.get(f"%DLQ%{group.name}")
        return 0 if topic is None else topic.last

    columns: list[Column[GroupState]] = [
        Column("group", Text("group"), lambda one: one.name, link=lambda one: visit.url("dead-letters", one.name)),
        Column("letters", Text("dead letters"), lambda one: snapshot.dead_letters(one.name), "number"),
        Column("last", Text("newest"), last, "time"),
        Column("members", Text("members"), lambda one: len(one.members) if one.members_at else None, "number"),
    ]
    table = listing(
        having, columns, visit.query, search=lambda one: one.name, sort="letters", name="dead-letters",
        caption=Text("Groups with dead letters"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    chrome = {
        "tables": [table],
        "live": LIVE_SECONDS,
        "lead": [Text("A dead letter is a message that a group could not handle after all its retries.")],
        "empty": Text("No group has given up a message."),
    }
    data = {**table.data(), "failed": unheard(visit)}
    return Page("listing.html", Text("Dead letters"), data, command(visit, "dlq", "list", "GROUP"), chrome=chrome)


@dataclass(frozen=True, slots=True)
class Narrow:
    """Which letters are wanted."""

    begin: int | None = None
    end: int | None = None
    topic: str = ""
    tag: str = ""
    text: str = ""
    only_new: bool = True

    def fits(self, letter: DeadLetter) -> bool:
        if self.only_new and letter.was_resent:
            return False
        if self.topic and letter.origin_topic != self.topic:
            return False
        if self.tag and letter.message.tags != self.tag:
            return False
        return not self.text or self.text in _searched(letter)


def _searched(letter: DeadLetter) -> str:
    try:
        body = letter.message.body
    except MessageError:
        body = letter.message.stored_body
    return body.decode("utf-8", "replace") + " " + letter.message.properties_text


def _narrow(visit: Visit, fields: dict[str, str]) -> Narrow:
    if fields.get("text") and mask_of(visit) is not None:
        raise PageRefused(403, Text("values are masked for your role, so that bodies cannot be searched"))

    def time(name: str) -> int | None:
        text = fields.get(name, "")
        found = parse_time(text, visit.zone) if text else None
        if text and found is None:
            raise PageRefused(400, Text("{name}={text}: expected a time like 2026-11-16T08:41", name=name, text=text))
        return found

    return Narrow(
        time("from"), time("to"), fields.get("topic", ""), fields.get("tag", ""), fields.get("text", ""),
        fields.get("resent", "") != "too",
    )  # fmt: skip


@dataclass(slots=True)
class LettersRead:
    """Letters that fit, how many were looked at, whether those were all, and the errors of brokers that told none."""

    letters: list[DeadLetter] = field(default_factory=list)
    looked_at: int = 0
    is_all: bool = True
    failed: dict[str, str] = field(default_factory=dict)


async def _read(visit: Visit, group: str, narrow: Narrow, ids: set[str]) -> LettersRead:
    read = LettersRead()
    unread: dict[MessageQueue, MQError] = {}
    reading = DeadLetters(visit.admin.session, group).read(
        begin=narrow.begin, end=narrow.end, message_ids=ids, unread=unread
    )
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for letter in reading:
                read.looked_at += 1
                if narrow.fits(letter) and (not ids or letter.message.offset_message_id in ids):
                    read.letters.append(letter)
                if read.looked_at >= MOST_READ:
                    read.is_all = False
                    break
    except TimeoutError:
        read.is_all = False
    read.failed = {queue.broker_name: said_by(error) for queue, error in unread.items()}
    return read


async def dead_letters(visit: Visit) -> Answer:
    group = visit.path("group")
    narrow = _narrow(visit, visit.query)
    read = await _read(visit, group, narrow, set())
    letters = read.letters
    letters.sort(key=lambda one: -one.message.store_timestamp)
    if visit.query.get("format") in ("csv", "jsonl"):
        return _export(visit, group, letters, visit.query["format"])
    mask = mask_of(visit)
    rows = [_row(visit, one, mask) for one in letters[:SHOWN]]
    known = visit.console.jobs.of_group(visit.cluster.name, group)
    data: dict[str, Any] = {
        "group": group,
        "found": len(letters),
        "looked_at": read.looked_at,
        "is_all": read.is_all,
        "failed": read.failed,
        "oldest": min((one.message.store_timestamp for one in letters), default=None),
        "newest": max((one.message.store_timestamp for one in letters), default=None),
        "rows": rows,
        "jobs": [job_data(one) for one in known],
    }
    chrome = {
        "fields": {name: visit.query.get(name, "") for name in ("from", "to", "topic", "tag", "text", "resent")},
        "topics": sorted({one.origin_topic for one in letters}),
        "tags": sorted({one.message.tags for one in letters if one.message.tags}),
        "may_export": visit.console.config.access.allow_export and mask is None,
        "may_search_text": mask is None,
        "crumbs": [crumb(visit, Text("Dead letters"), "dead-letters")],
    }
    return Page("dead_letters.html", as_is(group), data, command(visit, "dlq", "list", group), chrome=chrome)


def _row(visit: Visit, letter: DeadLetter, mask: re.Pattern[str] | None) -> dict[str, Any]:
    message = letter.message
    shows = visit.console.config.access.show_bodies and mask is None
    return {
        "letter": message.offset_message_id,
        "id": message.message_id,
        "topic": letter.origin_topic,
        "tag": message.tags or "",
        "keys": " ".join(message.keys),
        "given_up": message.store_timestamp,
        "times": message.reconsume_times,
        "broker": message.broker_name,
        "resent": letter.was_resent,
        "body": body_summary(message, 80) if shows else "",
        "properties": body_views.masked_properties(message.properties, mask),
        "address": visit.url(
            "at", message.queue.topic, message.broker_name, str(message.queue_id), str(message.queue_offset)
        ),
    }


def _export(visit: Visit, group: str, letters: list[DeadLetter], kind: str) -> Answer:
    if not visit.console.config.access.allow_export or mask_of(visit) is not None:
        raise PageRefused(403, Text("dead letters may not be exported here"))
    visit.audit("export dead letters", "done", subject=group, count=len(letters))
    documents = [one.document() for one in letters]
    if kind == "jsonl":
        lines = "".join(json_text(document) + "\n" for document in documents)
        return download(lines.encode(), f"dead-letters-{group}.jsonl", "application/x-ndjson")
    keys = ("originTopic", "originMsgId", "msgId", "tags", "keys", "storeTimestamp", "reconsumeTimes", "resent", "body")
    rows = [{key: str(document.get(key, "")) for key in keys} for document in documents]
    return download(to_csv(rows, keys).encode(), f"dead-letters-{group}.csv", "text/csv; charset=utf-8")


async def plan_resend(visit: Visit) -> Answer:
    """Keep the letters that fit as a job that has not begun: the plan."""
    pairs = await checked_pairs(visit)
    group = visit.path("group")
    ids = {value for name, value in pairs if name == "id"}
    fields = dict(pairs)
    narrow = _narrow(visit, fields)
    read = await _read(visit, group, narrow, ids)
    if not read.is_all:
        raise PageRefused(
            400,
            Text(
                "there are more letters than a job takes at once ({most:,}); narrow them by time",
                most=MOST_READ,
            ),
        )
    known = visit.console.jobs.resent(visit.cluster.name, group)
    wanted = [one for one in read.letters if jobs.place_text(one.place) not in known]
    if not wanted:
        raise PageRefused(400, Text("no letter fits that was not sent again before; nothing to plan"))
    missing = [
        Text("letters of {broker} are not in this plan: {error}", broker=broker, error=error)
        for broker, error in read.failed.items()
    ]
    job = visit.console.jobs.create(visit.cluster.name, group, visit.who.name, wanted, "; ".join(missing))
    return see_other(visit.url("jobs", job.id))


# --- jobs -------------------------------------------------------------------------------------------------------------


def job_data(job: Job) -> dict[str, Any]:
    return {
        "job": job.id,
        "group": job.group,
        "by": job.who,
        "created": job.created,
        "state": job.state,
        "rate": job.rate,
        "detail": word(job.detail),
        "total": job.total,
        "sent": job.sent,
        "failed": job.failed,
        "left": job.left,
        "words": job_words(job),
    }


def job_words(job: Job) -> Text:
    letters = plural(job.total, "{count} letter", "{count} letters")
    if not job.sent and not job.failed and job.state == jobs.PAUSED:
        return Text("{letters} planned, none sent yet", letters=letters)
    counts = {"sent": f"{job.sent:,}", "letters": letters, "failed": f"{job.failed:,}"}
    if not job.left:
        return Text("{sent} of {letters} sent, {failed} failed", **counts)
    return Text("{sent} of {letters} sent, {failed} failed, {left} left", left=f"{job.left:,}", **counts)


async def job_page(visit: Visit) -> Answer:
    job = visit.console.jobs.get(visit.path("job"), visit.cluster.name)
    items = visit.console.jobs.items(job.id)
    if visit.query.get("format") == "csv":
        visit.audit("export outcomes", "done", subject=job.group, job=job.id)
        rows = [
            {"place": one.place, "message": one.message, "state": one.state, "at": one.at or "", "result": one.result}
            for one in items
        ]
        text = to_csv(rows, ("place", "message", "state", "at", "result"))
        return download(text.encode(), f"job-{job.id}.csv", "text/csv; charset=utf-8")
    failed = [one for one in items if one.state == jobs.FAILED]
    recent = sorted((one for one in items if one.state in (jobs.SENT, jobs.NOTED)), key=lambda one: -one.at)
    data = {
        **job_data(job),
        "failures": [{"place": one.place, "message": one.message, "reason": word(one.result)} for one in failed[:500]],
        "recent": [
            {"place": one.place, "message": one.message, "at": one.at, "state": one.state} for one in recent[:20]
        ],
        "trial": await _trial(visit, job, items) if job.sent and job.state != jobs.RUNNING else None,
    }
    chrome = {
        "crumbs": [
            crumb(visit, Text("Dead letters"), "dead-letters"),
            crumb(visit, as_is(job.group), "dead-letters", job.group),
        ],
        "stream": visit.url("jobs", job.id, "events"),
        "is_begun": bool(job.sent or job.failed),
        "live": 0,
    }
    words = ("dlq", "resend", job.group, "--rate", f"{job.rate:g}")
    return Page("job.html", Text("Resend {id}", id=job.id), data, command(visit, *words), chrome=chrome)


async def _trial(visit: Visit, job: Job, items: list[jobs.Item]) -> dict[str, Any] | None:
    """What became of the letter that was sent first."""
    sent = sorted((one for one in items if one.state == jobs.SENT), key=lambda one: one.at)
    if not sent or len(sent) > 1:
        return None
    letter = await visit.admin.messages.by_offset_id(sent[0].letter)
    topic = letter.properties.get("RETRY_TOPIC", letter.topic)
    try:
        async with asyncio.timeout(TRIAL_SECONDS):
            fate = await visit.admin.messages.fate(letter.message_id, topic)
    except (MQError, TimeoutError) as error:
        return {
            "message": sent[0].message,
            "verdict": UNKNOWN,
            "reason": said_by(error) if str(error) else Text("no answer in time"),
            "at": None,
        }
    found = next((one for one in fate.verdicts if one.group == job.group), None)
    if found is None:
        return {
            "message": sent[0].message,
            "verdict": UNKNOWN,
            "reason": Text("the group does not read it"),
            "at": None,
        }
    return {"message": sent[0].message, "verdict": word(found.kind.value), "reason": found.reason, "at": found.at}


async def start_job(visit: Visit) -> Answer:
    """Begin or go on: `trial` sends one letter, else the rest at a rate."""
    form = dict(await checked_pairs(visit))
    job = visit.console.jobs.get(visit.path("job"), visit.cluster.name)
    if job.is_over:
        raise PageRefused(409, Text("job {id} is over", id=job.id))
    is_trial = form.get("trial") == "1"
    rate = _rate(form.get("rate", "50"))
    visit.console.jobs.start(job, visit.admin, rate, 1 if is_trial else None)
    visit.audit("resend dead letters", "started", subject=job.group, job=job.id, letters=1 if is_trial else job.left)
    if is_trial:
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                await visit.console.jobs.finished(job.id)
        except TimeoutError:
            pass
    return see_other(visit.url("jobs", job.id))


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 0.1 <= rate <= jobs.MOST_RATE:
        raise PageRefused(
            400,
            Text(
                "rate '{text}': expected letters a second, from 0.1 to {most:,.0f}",
                text=text,
                most=jobs.MOST_RATE,
            ),
        )
    return rate


async def pause_job(visit: Visit) -> Answer:
    form = dict(await checked_pairs(visit))
    job = visit.console.jobs.get(visit.path("job"), visit.cluster.name)
    state = jobs.STOPPED if form.get("stop") == "1" else jobs.PAUSED
    await visit.console.jobs.pause(job, state)
    visit.audit("resend dead letters", state, subject=job.group, job=job.id)
    return see_other(visit.url("jobs", job.id))


async def job_events(visit: Visit) -> Answer:
    """How far a job is, as it goes on."""
    job = visit.console.jobs.get(visit.path("job"), visit.cluster.name)
    owner = f"{visit.who.name} {visit.source}"
    if visit.console.streams.is_full(owner):
        raise PageRefused(429, Text("{most} streams are open already; close one of the other tails", most=MOST_OF_ONE))

    async def events() -> AsyncGenerator[str, None]:
        while True:
            now = visit.console.jobs.get(job.id, job.cluster)
            yield event("job", {**job_data(now), "words": visit.language.say(job_words(now))})
            if now.state != jobs.RUNNING:
                return
            await visit.console.jobs.change()
            await asyncio.sleep(0.2)

    return visit.console.streams.response(owner, events())
