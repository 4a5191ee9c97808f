"""Moving a group: by time, to the end, to where another group is, or in one queue. Always through a plan."""

from __future__ import annotations

from typing import Final

from downrange.client.admin.offsets import END
from downrange.client.admin.plans import PlanKind, PlanRequest
from downrange.console.formats import field_time, parse_time
from downrange.console.pages import Page
from downrange.console.requests import Answer, PageRefused, Visit, checked_form
from downrange.console.views.groups import found_group
from downrange.console.views.plans import planned
from downrange.console.views.shared import chart_rows, command, crumb, range_of
from downrange.model.message import MessageQueue
from downrange.model.text import Text, as_is

WAYS: Final = ("time", "end", "clone", "queue")


async def move_form(visit: Visit) -> Answer:
    group = found_group(visit)
    span = range_of(visit, "24h")
    at = visit.time_of("at")
    data = {
        "group": group.name,
        "topics": group.topics,
        "members": len(group.members),
        "groups": sorted(name for name in visit.cluster.snapshot.groups if name != group.name)[:2000],
        "queues": [
            f"{queue.broker_name}/{queue.queue_id}" for queue in sorted(group.queues) if queue.topic in group.topics
        ],
    }
    chrome = {
        "crumbs": [crumb(visit, Text("Groups"), "groups"), crumb(visit, as_is(group.name), "groups", group.name)],
        "at": field_time(at or visit.now - 3_600_000, visit.zone),
        "range": span,
        "ranges": ("1h", "6h", "24h", "7d", "30d"),
        "chart": [row[:3] for row in chart_rows(visit, visit.cluster, f"group:{group.name}", span)],
        "chart_source": visit.url("groups", group.name, "chart") + f".json?range={span}",
    }
    words = ("group", "reset-offset", group.name, "TOPIC", "--time", "TIME", "--dry-run")
    return Page("move.html", Text("Move offsets"), data, command(visit, *words), chrome=chrome)


async def plan_move(visit: Visit) -> Answer:
    group = found_group(visit)
    form = await checked_form(visit)
    topic, way = form.get("topic", "").strip(), form.get("way", "")
    if not topic:
        raise PageRefused(400, Text("choose the topic in which the group is to be moved"))
    if way not in WAYS:
        raise PageRefused(400, Text("way '{way}': there are {names}", way=way, names=", ".join(WAYS)))
    request, words = _request(visit, group.name, topic, way, form)
    back = visit.url("groups", group.name)
    return await planned(visit, request, command(visit, *words), back)


def _request(
    visit: Visit, group: str, topic: str, way: str, form: dict[str, str]
) -> tuple[PlanRequest, tuple[str, ...]]:
    """What the form asks for, and the command that does the same."""
    match way:
        case "time":
            text = form.get("time", "")
            at = parse_time(text, visit.zone)
            if at is None:
                raise PageRefused(400, Text("time '{text}': expected a time like 2026-11-16T08:41", text=text))
            return PlanRequest(PlanKind.RESET, group, topic, at), (
                "group",
                "reset-offset",
                group,
                topic,
                "--time",
                str(at),
            )
        case "end":
            return PlanRequest(PlanKind.SKIP, group, topic, END), ("group", "skip", group, topic)
        case "clone":
            source = form.get("source", "").strip()
            if not source:
                raise PageRefused(400, Text("name the group whose offsets are taken"))
            return PlanRequest(PlanKind.CLONE, group, topic, source=source), ("group", "clone", source, group, topic)
        case _:
            queue, offset = _queue(topic, form)
            words = ("group", "set-offset", group, topic, queue.broker_name, str(queue.queue_id), str(offset))
            return PlanRequest(PlanKind.QUEUE, group, topic, queue=queue, offset=offset), words


def _queue(topic: str, form: dict[str, str]) -> tuple[MessageQueue, int]:
    broker, _, number = form.get("queue", "").rpartition("/")
    offset = form.get("offset", "").strip().replace(",", "")
    if not broker or not number.isdecimal() or not offset.isdecimal() or len(offset) > 18:
        raise PageRefused(400, Text("choose a queue and type an offset, a whole number"))
    return MessageQueue(topic, broker, int(number)), int(offset)
