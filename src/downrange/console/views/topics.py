"""Topics: the list, one topic with its queues and groups, creating one, and plans to change or delete one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from downrange.client.admin.plans import PlanKind, PlanRequest
from downrange.console.pages import Page, json_text
from downrange.console.requests import Answer, PageRefused, Visit, checked_form, see_other
from downrange.console.snapshot import GroupState, QueueEnds, Snapshot, TopicState
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
    range_of,
    tab,
    unheard,
)
from downrange.console.words import word
from downrange.model.delay_levels import DEFAULT_DELAY_LEVELS, parse_delay_levels
from downrange.model.message import Message, MessageQueue
from downrange.model.text import Text, as_is, joined, plural
from downrange.model.topics import TopicConfig

KINDS = ("topic", "retry", "dead letters", "system", "one-broker", "all")
PERMISSIONS = {6: Text("read and write"), 4: Text("read only"), 2: Text("write only"), 0: Text("none")}


async def topics(visit: Visit) -> Answer:
    snapshot = visit.cluster.snapshot
    kind = visit.query.get("kind", "topic")
    if kind not in KINDS:
        raise PageRefused(400, Text("kind={kind}: there are {names}", kind=kind, names=", ".join(KINDS)))
    readers = _readers(snapshot.groups.values())
    columns: list[Column[TopicState]] = [
        Column("topic", Text("topic"), lambda one: one.name, link=lambda one: visit.url("topics", one.name)),
        Column("rate", Text("in/s"), lambda one: one.rate, "rate"),
        Column("messages", Text("messages"), lambda one: one.count if one.at else None, "number"),
        Column("queues", Text("queues"), lambda one: len(one.queues) if one.at else None, "number"),
        Column("brokers", Text("brokers"), lambda one: len(snapshot.brokers_of_topic(one.name)), "number"),
        Column("groups", Text("groups"), lambda one: readers.get(one.name, 0), "number"),
        Column("last", Text("last message"), lambda one: one.last if one.at else None, "time"),
    ]
    table = listing(
        _of_kind(snapshot, kind), columns, visit.query,
        search=lambda one: one.name, sort="topic", name="topics", caption=Text("Topics"),
    )  # fmt: skip
    if visit.query.get("format") == "csv":
        return table
    choices = [
        {"label": word(one), "address": "?" + urlencode({"kind": one}), "is_current": one == kind} for one in KINDS
    ]
    actions = [{"label": Text("New topic"), "address": visit.url("new-topic")}] if visit.may(Role.OPERATOR) else []
    chrome = {
        "tables": [table], "choices": choices, "actions": actions, "live": LIVE_SECONDS,
        "empty": Text("No topic yet. Make one: {command}", command=command(visit, "topic", "create", "orders")),
    }  # fmt: skip
    for row in table.rows[:50]:
        visit.cluster.look("topic", row["topic"])
    data = {**table.data(), "failed": unheard(visit)}
    return Page("listing.html", Text("Topics"), data, command(visit, "topic", "list"), chrome=chrome)


def _readers(groups: Any) -> dict[str, int]:
    """How many groups read each topic."""
    counts: dict[str, int] = {}
    for group in groups:
        for topic in group.topics:
            counts[topic] = counts.get(topic, 0) + 1
    return counts


def _of_kind(snapshot: Snapshot, kind: str) -> list[TopicState]:
    own, everything = snapshot.own_topics, snapshot.topics.values()
    match kind:
        case "all":
            return list(everything)
        case "topic":
            return list(snapshot.user_topics())
        case "one-broker":
            return [one for one in snapshot.user_topics() if len(snapshot.brokers_of_topic(one.name)) == 1]
        case "system":
            return [one for one in everything if one.kind == "system" or one.name in own]
        case _:
            return [one for one in everything if one.kind == kind]


def found_topic(visit: Visit) -> TopicState:
    name = visit.path("topic")
    topic = visit.cluster.snapshot.topics.get(name)
    if topic is None:
        known = Text("") if visit.cluster.snapshot.at else Text(", or the console has not heard of it yet")
        raise PageRefused(
            404,
            Text(
                "no broker of {cluster} serves the topic {name}{known}",
                cluster=visit.cluster.name,
                name=name,
                known=known,
            ),
        )
    visit.cluster.look("topic", name)
    visit.console.samplers[visit.cluster.name].nudge()
    return topic


async def topic(visit: Visit) -> Answer:
    one = found_topic(visit)
    snapshot = visit.cluster.snapshot
    shown = visit.query.get("tab", "queues")
    groups = snapshot.groups_of(one.name)
    for group in groups[:50]:
        visit.cluster.look("group", group.name)
    group_table = listing(
        groups, _group_columns(visit, one.name), {}, sort="behind", name="groups", caption=Text("Groups")
    )
    queue_columns: list[Column[tuple[MessageQueue, QueueEnds]]] = [
        Column("queue", Text("queue"), lambda row: row[0].queue_id, "offset"),
        Column("broker", Text("broker"), lambda row: row[0].broker_name),
        Column("first", Text("min"), lambda row: row[1].first, "offset"),
        Column("end", Text("max"), lambda row: row[1].end, "offset", link=lambda row: _last(visit, *row)),
        Column("messages", Text("messages"), lambda row: row[1].end - row[1].first, "number"),
        Column("last", Text("last message"), lambda row: row[1].last, "time"),
    ]
    parameters = {key: value for key, value in visit.query.items() if key in ("sort", "order", "page", "tab")}
    queues = listing(
        sorted(one.queues.items()), queue_columns, {"sort": "queue", "order": "asc"} | parameters, name="queues",
        caption=Text("Queues"),
    )  # fmt: skip
    span = range_of(visit)
    configs = {state.name: state.topics[one.name] for state in snapshot.brokers_of_topic(one.name)}
    writers = sum(1 for state in snapshot.masters for _ in state.producers)
    data = {
        "topic": one.name,
        "kind": one.kind,
        "facts": facts(visit, one, configs),
        "rate": one.rate,
        "messages": one.count,
        "at": one.at,
        "failed": {**one.errors, **unheard(visit, {queue.broker_name for queue in one.queues})},
        "queues": queues.rows,
        "groups": group_table.rows,
        "settings": {name: config_row(config) for name, config in configs.items()},
    }
    chrome = {
        "queue_table": queues,
        "group_table": group_table,
        "tab": shown,
        "tabs": [
            tab(visit, "queues", Text("Queues and groups")),
            tab(visit, "send", Text("Send")) if visit.may(Role.OPERATOR) else tab(visit, "settings", Text("Settings")),
            *([tab(visit, "settings", Text("Settings"))] if visit.may(Role.OPERATOR) else []),
        ],
        "crumbs": [crumb(visit, Text("Topics"), "topics")],
        "range": span,
        "ranges": ("1h", "6h", "24h", "7d", "30d"),
        "chart": chart_rows(visit, visit.cluster, f"topic:{one.name}", span),
        "chart_source": visit.url("topics", one.name, "chart") + f".json?range={span}",
        "live": LIVE_SECONDS if shown == "queues" else 0,
        "is_old": bool(age_of(visit, one.at)),
        "writers": writers,
        "result": visit.query.get("sent", ""),
        "permissions": PERMISSIONS,
        "delays": parse_delay_levels(DEFAULT_DELAY_LEVELS),
        "again": _again(visit),
    }
    return Page("topic.html", as_is(one.name), data, command(visit, "topic", "status", one.name), chrome=chrome)


def _again(visit: Visit) -> dict[str, str]:
    """Fields of the form of sending, from the address: `Send again` of a message fills them."""
    return {key: visit.query.get(key, "") for key in ("body", "tags", "keys", "properties")}


def _last(visit: Visit, queue: MessageQueue, ends: QueueEnds) -> str | None:
    if ends.end <= ends.first:
        return None
    return visit.url("at", queue.topic, queue.broker_name, str(queue.queue_id), str(ends.end - 1))


def facts(visit: Visit, one: TopicState, configs: dict[str, TopicConfig]) -> Text:
    queues = sum(config.write_queue_nums for config in configs.values())
    words = {PERMISSIONS[config.perm & 6] for config in configs.values()}
    oldest = [one.runtime.earliest_message_timestamp for one in visit.cluster.snapshot.masters if one.runtime]
    kept = min((stamp for stamp in oldest if stamp), default=None)
    on_brokers = plural(len(configs), "{count} broker", "{count} brokers")
    parts = [
        plural(queues, "{count} queue on {brokers}", "{count} queues on {brokers}", brokers=on_brokers),
        joined(" / ", sorted(words)),
    ]
    parts.append(plural(one.count, "{count} message", "{count} messages"))
    if kept is not None:
        parts.append(
            Text("the broker keeps messages since {time}", time=visit.console.look(visit, visit.cluster).time(kept))
        )
    if age := age_of(visit, one.at):
        parts.append(age)
    return joined(" · ", parts)


def config_row(config: TopicConfig) -> dict[str, Any]:
    return {
        "readQueueNums": config.read_queue_nums,
        "writeQueueNums": config.write_queue_nums,
        "perm": PERMISSIONS[config.perm & 6],
        "order": config.order,
        "attributes": config.attributes or {},
    }


def _group_columns(visit: Visit, topic: str) -> list[Column[GroupState]]:
    def behind(group: GroupState) -> int:
        return sum(at.behind for queue, at in group.queues.items() if queue.topic == topic)

    def oldest(group: GroupState) -> int | None:
        ages = [at.oldest for queue, at in group.queues.items() if queue.topic == topic and at.behind]
        known = [age for age in ages if age is not None]
        return max(known) if known else (None if behind(group) else 0)

    def expression(group: GroupState) -> str:
        found = group.subscriptions.get(topic)
        return found.expression if found is not None else ""

    return [
        Column("group", Text("group"), lambda one: one.name, link=lambda one: visit.url("groups", one.name)),
        Column("behind", Text("behind"), behind, "number"),
        Column("oldest", Text("oldest waiting"), oldest, "span"),
        Column("members", Text("members"), lambda one: len(one.members) if one.members_at else None, "number"),
        Column("filter", Text("filter"), expression, "code"),
    ]


async def topic_chart(visit: Visit) -> Answer:
    rows = chart_rows(visit, visit.cluster, f"topic:{visit.path('topic')}", range_of(visit))
    return Response(json_text({"data": chart_data(rows, 1), "marks": []}), media_type="application/json")


# --- writing ----------------------------------------------------------------------------------------------------------


async def new_topic(visit: Visit) -> Answer:
    chrome = {"crumbs": [crumb(visit, Text("Topics"), "topics")], "clusters_known": _cluster_names(visit)}
    return Page("new_topic.html", Text("New topic"), {}, command(visit, "topic", "create", "NAME"), chrome=chrome)


def _cluster_names(visit: Visit) -> list[str]:
    return sorted({one.broker.cluster for one in visit.cluster.snapshot.masters})


async def create_topic(visit: Visit) -> Answer:
    form = await checked_form(visit)
    queues = number_of(form, "queues", 1, 1024)
    config = TopicConfig(form.get("name", "").strip(), queues, queues, order=form.get("order") == "on")
    if kind := form.get("message_type", ""):
        config = replace(config, attributes={"message.type": kind})
    answers = await visit.admin.topics.create(config, cluster=form.get("cluster") or None)
    outcome = "failed" if answers.failed else "done"
    failures = {str(server): str(error) for server, error in answers.failed.items()}
    visit.audit("create topic", outcome, subject=config.topic_name, failed=failures)
    answers.raise_if_none()
    visit.console.samplers[visit.cluster.name].soon()
    return see_other(visit.url("topics") + "?" + urlencode({"q": config.topic_name}))


def number_of(form: dict[str, str], name: str, least: int, most: int) -> int:
    text = form.get(name, "").strip()
    if not text.isdecimal() or len(text) > 12 or not least <= int(text) <= most:
        raise PageRefused(
            400,
            Text(
                "{name}: '{text}' is no whole number from {least} to {most:,}",
                name=name,
                text=text,
                least=least,
                most=most,
            ),
        )
    return int(text)


async def send(visit: Visit) -> Answer:
    """Send a test message."""
    one = found_topic(visit)
    form = await checked_form(visit)
    message = Message(
        one.name,
        form.get("body", "").encode(),
        form.get("tags", "").strip() or None,
        form.get("keys", "").strip() or None,
        properties=parse_properties(form.get("properties", "")),
    )
    level = form.get("delay", "0")
    if level.isdecimal() and 0 < int(level) <= 18:
        message.properties["DELAY"] = level
    queue = form.get("queue", "")
    broker, _, number = queue.rpartition("/")
    result = await _send(visit, message, broker or None, int(number) if broker and number.isdecimal() else None)
    visit.audit("send", "done", subject=one.name, message=result, bytes=len(message.body))
    return see_other(visit.url("topics", one.name) + "?" + urlencode({"tab": "send", "sent": result}))


async def _send(visit: Visit, message: Message, broker: str | None, queue: int | None) -> str:
    level = message.properties.pop("DELAY", None)
    if level is not None:
        message.delay_level = int(level)
    return (await visit.admin.messages.send(message, broker, queue)).message_id


def parse_properties(text: str) -> dict[str, str]:
    """`name=value`, one a line."""
    found = {}
    for line in text.splitlines():
        if line.strip():
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise PageRefused(400, Text("properties: '{line}' is not name=value", line=line))
            found[name.strip()] = value.strip()
    return found


async def plan_topic_settings(visit: Visit) -> Answer:
    """A plan that changes queues and permission on each broker of a topic."""
    one = found_topic(visit)
    form = await checked_form(visit)
    queues, perm = str(number_of(form, "queues", 1, 1024)), str(number_of(form, "perm", 0, 6))
    settings = {"readQueueNums": queues, "writeQueueNums": queues, "perm": perm}
    request = PlanRequest(PlanKind.TOPIC_SETTINGS, one.name, settings=settings)
    words = ("topic", "update", one.name, "-r", queues, "-w", queues, "-p", perm)
    return await planned(visit, request, command(visit, *words), visit.url("topics", one.name))


async def plan_topic_deletion(visit: Visit) -> Answer:
    """A plan that says who still reads a topic."""
    one = found_topic(visit)
    await checked_form(visit)
    request = PlanRequest(PlanKind.DELETE_TOPIC, one.name)
    return await planned(visit, request, command(visit, "topic", "delete", one.name), visit.url("topics"))
