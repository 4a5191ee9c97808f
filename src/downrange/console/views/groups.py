"""Groups: the list, and one group with its progress, members, subscriptions, stacks and settings."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from downrange.client.admin.groups import to_table
from downrange.client.admin.plans import PlanKind, PlanRequest
from downrange.console.findings import differences
from downrange.console.formats import span
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.snapshot import GroupState, Member, QueueProgress
from downrange.console.tables import Column, listing
from downrange.console.users_file import Role
from downrange.console.views.plans import planned
from downrange.console.views.shared import (
    LIVE_SECONDS,
    age_of,
    chart_data,
    chart_rows,
    command,
    crumb,
    group_columns,
    range_of,
    tab,
    unheard,
)
from downrange.console.views.topics import number_of
from downrange.console.words import word
from downrange.model.message import MessageQueue
from downrange.model.text import Text, as_is, joined, plural
from downrange.model.topics import RETRY_PREFIX, SubscriptionGroupConfig
from downrange.protocol.codes import version_name

STACK_SECONDS = 12.0


async def groups(visit: Visit) -> Answer:
    snapshot = visit.cluster.snapshot
    table = listing(
        snapshot.groups.values(), group_columns(visit), visit.query, search=lambda one: f"{one.name} {one.topics}",
        sort="behind", name="groups", caption=Text("Consumer groups"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    for row in table.rows[:50]:
        visit.cluster.look("group", row["group"])
    actions = [{"label": Text("New group"), "address": visit.url("new-group")}] if visit.may(Role.OPERATOR) else []
    chrome = {
        "tables": [table],
        "actions": actions,
        "live": LIVE_SECONDS,
        "empty": Text("No group yet: a group comes into being when its first consumer connects."),
    }
    data = {**table.data(), "failed": unheard(visit)}
    return Page("listing.html", Text("Groups"), data, command(visit, "group", "list"), chrome=chrome)


def found_group(visit: Visit) -> GroupState:
    name = visit.path("group")
    group = visit.cluster.snapshot.groups.get(name)
    if group is None:
        raise PageRefused(
            404,
            Text(
                "no broker of {cluster} knows the group {name}, or the console has not heard of it",
                cluster=visit.cluster.name,
                name=name,
            ),
        )
    visit.cluster.look("group", name)
    visit.console.samplers[visit.cluster.name].nudge()
    return group


async def group(visit: Visit) -> Answer:
    one = found_group(visit)
    shown = visit.query.get("tab", "progress")
    findings = [finding for finding in visit.console.findings(visit, visit.cluster) if finding.subject == one.name]
    progress = listing(
        sorted(one.queues.items()), progress_columns(visit, one), visit.query, sort="behind", name="progress",
        caption=Text("Progress in each queue"),
    )  # fmt: skip
    members = listing(one.members.values(), member_columns(visit, one), {}, name="members", caption=Text("Members"))
    if visit.query.get("format") == "csv":
        return members if shown == "members" else progress
    dead = visit.cluster.snapshot.dead_letters(one.name)
    unlike = differences(one)
    span_name = range_of(visit)
    data = {
        "group": one.name,
        "behind": one.behind,
        "oldest": one.oldest if one.behind else 0,
        "behind_since": one.behind_since,
        "consume_rate": one.consume_rate,
        "message_model": one.message_model,
        "consume_type": one.consume_type,
        "dead": dead,
        "at": one.at,
        "failed": {**one.errors, **unheard(visit, {queue.broker_name for queue in one.queues})},
        "progress": progress.rows,
        "members": members.rows,
        "subscriptions": subscription_rows(one),
        "differences": {
            topic: {expression: [member.client_id for member in who] for expression, who in by.items()}
            for topic, by in unlike.items()
        },
        "settings": {
            state.name: to_table(state.groups[one.name]) for state in visit.cluster.snapshot.brokers_of_group(one.name)
        },
    }
    chrome = {
        "findings": findings,
        "facts": _facts(visit, one),
        "progress_table": progress,
        "member_table": members,
        "tab": shown,
        "tabs": [
            tab(visit, "progress", Text("Progress")),
            tab(visit, "members", Text("Members"), len(one.members) or ""),
            tab(visit, "subscriptions", Text("Subscriptions"), "!" if unlike else ""),
            tab(visit, "settings", Text("Settings")),
        ],
        "crumbs": [crumb(visit, Text("Groups"), "groups")],
        "range": span_name,
        "ranges": ("1h", "6h", "24h", "7d", "30d"),
        "chart": [row[:3] for row in chart_rows(visit, visit.cluster, f"group:{one.name}", span_name)],
        "chart_source": visit.url("groups", one.name, "chart") + f".json?{_chart_query(visit, span_name)}",
        "live": LIVE_SECONDS if shown != "settings" else 0,
        "is_old": bool(age_of(visit, one.at)),
    }
    return Page("group.html", as_is(one.name), data, command(visit, "group", "progress", one.name), chrome=chrome)


def _chart_query(visit: Visit, span_name: str) -> str:
    at = visit.query.get("at", "")
    return urlencode({"range": span_name, **({"at": at} if at else {})})


def _facts(visit: Visit, one: GroupState) -> Text:
    parts = [Text("not asked yet")]
    if one.behind is not None:
        parts = [plural(one.behind, "{count} message behind", "{count} messages behind")]
    if one.behind and one.oldest is not None:
        parts.append(Text("the oldest waits for {span}", span=span(one.oldest)))
    parts.append(plural(len(one.members), "{count} member", "{count} members"))
    if one.message_model:
        parts.append(word(one.message_model.lower()))
    if one.consume_rate:
        parts.append(Text("{rate:.1f}/s consumed", rate=one.consume_rate))
    if one.at and (age := age_of(visit, one.at)):
        parts.append(age)
    return joined(" · ", parts)


def progress_columns(visit: Visit, one: GroupState) -> list[Column[tuple[MessageQueue, QueueProgress]]]:
    stuck = set(one.stuck_queues)
    snapshot = visit.cluster.snapshot
    quiet = {name: Text("broker gone") if name in snapshot.lost else Text("broker silent") for name in snapshot.unheard}

    def member(row: tuple[MessageQueue, QueueProgress]) -> str:
        holder = one.holder(row[0])
        if holder is not None:
            return holder.client_id
        return Text("nobody") if one.knows_holders and row[0].broker_name not in quiet else ""

    def state(row: tuple[MessageQueue, QueueProgress]) -> str:
        queue, at = row
        if queue.broker_name in quiet:
            return quiet[queue.broker_name]
        if not at.behind:
            return ""
        if queue in stuck:
            return Text("stuck")
        return Text("nobody there") if not one.members or (one.knows_holders and one.holder(queue) is None) else ""

    return [
        Column("topic", Text("topic"), lambda row: row[0].topic, link=lambda row: visit.url("topics", row[0].topic)),
        Column("broker", Text("broker"), lambda row: row[0].broker_name),
        Column("queue", Text("queue"), lambda row: row[0].queue_id, "offset"),
        Column("behind", Text("behind"), lambda row: row[1].behind, "number"),
        Column(
            "committed", Text("committed"), lambda row: row[1].committed, "offset", link=lambda row: _next(visit, *row)
        ),
        Column("end", Text("end"), lambda row: row[1].end, "offset"),
        Column("oldest", Text("oldest waiting"), lambda row: row[1].oldest if row[1].behind else "", "span"),
        Column("member", Text("member"), member, "code"),
        Column(
            "moved",
            Text("moved"),
            lambda row: row[1].moved_at,
            "time",
            title=Text("when the committed offset last changed"),
        ),
        Column("state", Text("state"), state, "state"),
    ]


def _next(visit: Visit, queue: MessageQueue, at: QueueProgress) -> str | None:
    """The message that the group gets next."""
    if not at.behind:
        return None
    return visit.url("at", queue.topic, queue.broker_name, str(queue.queue_id), str(at.committed))


def member_columns(visit: Visit, one: GroupState) -> list[Column[Member]]:
    def stack(member: Member) -> str:
        return visit.url("groups", one.name, "stack") + "?" + urlencode({"member": member.client_id})

    return [
        Column("member", Text("member"), lambda member: member.client_id, "code"),
        Column("address", Text("address"), lambda member: member.address, "code"),
        Column("language", Text("language"), lambda member: member.language),
        Column("version", Text("version"), lambda member: version_name(member.version)),
        Column(
            "queues", Text("queues"), lambda member: None if member.queues is None else len(member.queues), "number"
        ),
        Column(
            "told",
            Text("told"),
            lambda member: member.told_at or "",
            "time",
            title=Text("when it last told its queues"),
        ),
        Column("stack", Text("stack"), lambda member: Text("stack"), link=stack),
        Column("error", Text("error"), lambda member: member.error or ""),
    ]


def subscription_rows(one: GroupState) -> list[dict[str, Any]]:
    """The expressions of each member for each topic; those that the broker has merged where members have not told."""
    rows = [
        {
            "topic": sub.topic,
            "member": member.client_id,
            "expression": sub.expression,
            "kind": sub.expression_type or "TAG",
        }
        for member in one.members.values()
        for sub in member.subscriptions or ()
        if not sub.topic.startswith(RETRY_PREFIX)
    ]
    if not rows:
        rows = [
            {"topic": sub.topic, "member": "", "expression": sub.expression, "kind": sub.expression_type or "TAG"}
            for sub in one.subscriptions.values()
            if not sub.topic.startswith(RETRY_PREFIX)
        ]
    return sorted(rows, key=lambda row: (row["topic"], row["expression"], row["member"]))


async def group_chart(visit: Visit) -> Answer:
    """Behind and the age of the oldest; marks are moves of this group, and the time in the address."""
    name = visit.path("group")
    rows = chart_rows(visit, visit.cluster, f"group:{name}", range_of(visit))
    marks = [
        {"at": entry["at"] / 1000, "label": Text("moved")}
        for entry in visit.console.audit.moves_over(visit.cluster.name, name)
    ]
    at = visit.time_of("at")
    if at is not None:
        marks.append({"at": at / 1000, "label": Text("here")})
    return Response(json_text({"data": chart_data(rows, 2), "marks": marks}), media_type="application/json")


async def stack(visit: Visit) -> Answer:
    """What the threads of one member do at the moment; asked for now."""
    one = found_group(visit)
    client_id = visit.query.get("member", "")
    if client_id not in one.members:
        raise PageRefused(404, Text("the group {name} has no member {client_id}", name=one.name, client_id=client_id))
    try:
        async with asyncio.timeout(STACK_SECONDS):
            info = await visit.admin.groups.running_info(one.name, client_id, with_stack=True)
    except TimeoutError:
        raise PageRefused(
            504,
            Text(
                "{client_id} did not answer within {seconds:g} s",
                client_id=client_id,
                seconds=STACK_SECONDS,
            ),
        ) from None
    queues = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "cached": held.cached_msg_count,
            "offset": held.commit_offset,
            "pulled": held.last_pull_timestamp,
            "consumed": held.last_consume_timestamp,
        }
        for queue, held in sorted(info.mq_table.items())
    ]
    data = {
        "group": one.name,
        "member": client_id,
        "stack": info.jstack or "",
        "queues": queues,
        "properties": {key: str(value) for key, value in sorted(info.properties.items())},
    }
    words = ("group", "status", one.name, "--client", client_id, "--stack")
    chrome = {"crumbs": [crumb(visit, Text("Groups"), "groups"), crumb(visit, as_is(one.name), "groups", one.name)]}
    return Page(
        "stack.html", Text("Stack of {client_id}", client_id=client_id), data, command(visit, *words), chrome=chrome
    )


# --- writing ----------------------------------------------------------------------------------------------------------


async def new_group(visit: Visit) -> Answer:
    return Page("new_group.html", Text("New group"), {}, command(visit, "group", "create", "NAME"))


async def create_group(visit: Visit) -> Answer:
    form = await checked_form(visit)
    config = SubscriptionGroupConfig(
        form.get("name", "").strip(), retry_max_times=number_of(form, "retry_max_times", 0, 1000)
    )
    answers = await visit.admin.groups.create(config)
    failures = {str(server): str(error) for server, error in answers.failed.items()}
    visit.audit("create group", "failed" if failures else "done", subject=config.group_name, failed=failures)
    answers.raise_if_none()
    visit.console.samplers[visit.cluster.name].soon()
    return see_other(visit.url("groups") + "?" + urlencode({"q": config.group_name}))


async def plan_group_settings(visit: Visit) -> Answer:
    """A plan that changes the configuration of a group on every broker that has it."""
    one = found_group(visit)
    form = await checked_form(visit)
    settings = {
        "consumeEnable": "true" if form.get("consume_enable") == "on" else "false",
        "consumeBroadcastEnable": "true" if form.get("consume_broadcast_enable") == "on" else "false",
        "retryMaxTimes": str(number_of(form, "retry_max_times", 0, 1000)),
        "retryQueueNums": str(number_of(form, "retry_queue_nums", 1, 1024)),
    }
    request = PlanRequest(PlanKind.GROUP_SETTINGS, one.name, settings=settings)
    words = ("group", "create", one.name, "--retry-max-times", settings["retryMaxTimes"])
    return await planned(visit, request, command(visit, *words), visit.url("groups", one.name))


async def plan_group_deletion(visit: Visit) -> Answer:
    one = found_group(visit)
    await checked_form(visit)
    request = PlanRequest(PlanKind.DELETE_GROUP, one.name, remove_offsets=True)
    return await planned(visit, request, command(visit, "group", "delete", one.name, "--offsets"), visit.url("groups"))
