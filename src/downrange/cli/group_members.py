"""`downrange group connections|producers|status`: the running members of a group, and what they report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import broker_row, shows
from downrange.cli.options import Broker, Group
from downrange.cli.output import Answer, Column, Table, one_line
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.model.errors import MQError


@shows
async def show_connections(admin: Admin, group: Group, broker: Broker = None) -> Answer:
    """Show the running members of a group and their subscriptions."""
    from downrange.client.admin.group_verdicts import subscriptions_of
    from downrange.client.admin.groups import member_row
    from downrange.client.per_server import ask_each

    asked = None if broker is None else [await admin.session.broker(broker)]
    connections = await admin.groups.connections(group, asked)
    online = [one for one in connections.done.values() if one is not None]
    members = {member.client_id: member_row(member) for one in online for member in one.connection_set}
    infos = await ask_each(sorted(members), lambda name: admin.groups.running_info(group, name))
    expressions = [
        {"clientId": name, "topic": topic, "subExpression": expression}
        for name, info in infos.done.items()
        for topic, expression in sorted(subscriptions_of(info).items())
    ]
    subscriptions: dict[str, dict[str, str]] = {
        topic: {"topic": topic, "subExpression": subscription.expression, "type": subscription.expression_type}
        for one in online
        for topic, subscription in one.subscription_table.items()
    }
    document: dict[str, Any] = {
        "group": group,
        "members": [members[name] for name in sorted(members)],
        "memberSubscriptions": expressions,
        "subscriptions": [subscriptions[name] for name in sorted(subscriptions)],
        "consumeType": online[0].consume_type if online else None,
        "messageModel": online[0].message_model if online else None,
        "consumeFromWhere": online[0].consume_from_where if online else None,
    }
    if not online:
        return Answer(document, [f"group {group} has no running member"], connections.failed)
    parts: list[Table | str] = [
        Table(_MEMBER_COLUMNS, document["members"]),
        "\nSubscriptions:",
        Table([Column("Topic", "topic"), Column("SubExpression", "subExpression")], document["subscriptions"]),
        *_member_parts(expressions, infos.failed),
        f"\nConsumeType: {document['consumeType']}\nMessageModel: {document['messageModel']}\n"
        f"ConsumeFromWhere: {document['consumeFromWhere']}",
    ]
    return Answer(document, parts, connections.failed)


def _member_parts(expressions: list[dict[str, str]], silent: Mapping[str, MQError]) -> list[Table | str]:
    """The expressions of each member: the broker knows only those of the member that it heard last."""
    columns = [Column("ClientId", "clientId"), Column("Topic", "topic"), Column("SubExpression", "subExpression")]
    parts: list[Table | str] = ["\nSubscriptions that members report:", Table(columns, expressions)]
    return [*parts, *(f"{name} does not report its own: {one_line(error)}" for name, error in silent.items())]


_MEMBER_COLUMNS = [
    Column("ClientId", "clientId"),
    Column("ClientAddr", "clientAddr"),
    Column("Language", "language"),
    Column("Version", "version"),
]


@shows
async def show_producers(
    admin: Admin,
    group: Annotated[str, typer.Argument(help="Producer group.")],
    topic: Annotated[str, typer.Option("--topic", "-t", help="A topic that the group sends to.")],
) -> Answer:
    """Show the running producers of a producer group."""
    from downrange.client.admin.groups import member_row

    connections = await admin.groups.producers(group, topic)
    rows = [
        {**broker_row(broker), **member_row(member)}
        for broker, one in connections.done.items()
        for member in one.connection_set
    ]
    columns = [Column("Broker Name", "broker"), *_MEMBER_COLUMNS]
    return Answer({"group": group, "producers": rows}, [Table(columns, rows)], connections.failed)


@shows
async def show_status(
    admin: Admin,
    group: Group,
    client: Annotated[str | None, typer.Option("--client", "-i", help="Only the member with this client id.")] = None,
    stack: Annotated[bool, typer.Option("--stack", "-s", help="Show the stacks of the member's threads.")] = False,
    broker: Broker = None,
) -> Answer:
    """Show the state that running members report: queues, offsets, rates, settings."""
    from downrange.client.per_server import ask_each

    if client is not None:
        members = {client}
    else:
        asked = None if broker is None else [await admin.session.broker(broker)]
        connections = await admin.groups.connections(group, asked)
        connections.raise_if_none()
        online = [one for one in connections.done.values() if one is not None]
        members = {member.client_id for one in online for member in one.connection_set}
    infos = await ask_each(sorted(members), lambda name: admin.groups.running_info(group, name, with_stack=stack))
    if client is not None:
        infos.raise_if_none()
    documents = [_running(name, info) for name, info in infos.done.items()]
    parts: list[Table | str] = []
    for document in documents:
        parts += _running_parts(document)
    if not members:
        parts = [f"group {group} has no running member"]
    answer: dict[str, Any] = {"group": group, "members": documents}
    if client is None and infos.done:
        verdicts = await admin.groups.verdicts(infos.done)
        answer["verdicts"] = {
            "sameSubscription": verdicts.is_subscribed_alike,
            "rebalanceOk": verdicts.is_balanced,
            "reasons": list(verdicts.reasons),
        }
        parts += ["", *verdicts.lines, *(f"  {reason}" for reason in verdicts.reasons)]
    return Answer(answer, parts, infos.failed)


def _running(client_id: str, info: Any) -> dict[str, Any]:
    return {
        "clientId": client_id,
        "properties": dict(sorted(info.properties.items())),
        "subscriptions": [
            {"topic": one.topic, "subExpression": one.expression, "classFilter": one.class_filter_mode}
            for one in sorted(info.subscription_set, key=lambda one: str(one.topic))
        ],
        "queues": [
            {
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queueId": queue.queue_id,
                "consumerOffset": held.commit_offset,
                "cachedMsgCount": held.cached_msg_count,
                "locked": held.locked,
                "dropped": held.dropped,
                "lastPullTimestamp": held.last_pull_timestamp,
                "lastConsumeTimestamp": held.last_consume_timestamp,
            }
            for queue, held in sorted(info.mq_table.items(), key=lambda item: item[0])
        ],
        "popQueues": [
            {
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queueId": queue.queue_id,
                "waitAckCount": held.wait_ack_count,
                "lastPopTimestamp": held.last_pop_timestamp,
            }
            for queue, held in sorted((info.mq_pop_table or {}).items(), key=lambda item: item[0])
        ],
        "topics": [
            {
                "topic": topic,
                "pullRT": status.pull_rt,
                "pullTPS": status.pull_tps,
                "consumeRT": status.consume_rt,
                "consumeOKTPS": status.consume_ok_tps,
                "consumeFailedTPS": status.consume_failed_tps,
                "consumeFailedMsgs": status.consume_failed_msgs,
            }
            for topic, status in sorted(info.status_table.items())
        ],
        "jstack": info.jstack,
    }


_POP_COLUMNS = [
    Column("Topic", "topic"),
    Column("Broker Name", "broker"),
    Column("QID", "queueId"),
    Column("Wait Ack", "waitAckCount"),
    Column("Last Pop", "lastPopTimestamp", time_text),
]


def _running_parts(document: dict[str, Any]) -> list[Table | str]:
    properties = "\n".join(f"{key:<40}: {value}" for key, value in document["properties"].items())
    queues = [
        Column("Topic", "topic"),
        Column("Broker Name", "broker"),
        Column("QID", "queueId"),
        Column("Consumer Offset", "consumerOffset"),
        Column("Cached", "cachedMsgCount"),
        Column("Locked", "locked"),
        Column("Last Pull", "lastPullTimestamp", time_text),
        Column("Last Consume", "lastConsumeTimestamp", time_text),
    ]
    topics = [
        Column("Topic", "topic"),
        Column("Pull RT", "pullRT"),
        Column("Pull TPS", "pullTPS"),
        Column("Consume RT", "consumeRT"),
        Column("ConsumeOK TPS", "consumeOKTPS"),
        Column("ConsumeFailed TPS", "consumeFailedTPS"),
        Column("Failed In Hour", "consumeFailedMsgs"),
    ]
    parts: list[Table | str] = [
        f"Member {document['clientId']}\n\n{properties}\n",
        Table([Column("Topic", "topic"), Column("SubExpression", "subExpression")], document["subscriptions"]),
        "",
        Table(queues, document["queues"]),
        "",
        *([Table(_POP_COLUMNS, document["popQueues"]), ""] if document["popQueues"] else ()),
        Table(topics, document["topics"]),
    ]
    return [*parts, f"\n{document['jstack']}"] if document["jstack"] else parts
