"""`downrange group …`: consumer groups, their members and their offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster import PROGRESS_COLUMNS, progress_row, told
from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.config import settings_text
from downrange.cli.options import Broker, Cluster, Group, Topic, UsageError, command_family
from downrange.cli.output import Answer, Column, Table, is_behind
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.model.errors import MQError
    from downrange.model.message import MessageQueue

app = command_family("List consumer groups, look at them, create and delete them, move their offsets.")

OneTopic = Annotated[str | None, typer.Option("--topic", "-t", help="Only this topic.")]


@app.command("list")
@shows
async def list_groups(admin: Admin) -> Answer:
    """List groups with their members and how far they are behind."""
    overview = await admin.groups.overview()
    rows = [
        {
            "group": one.group,
            "count": one.members,
            "version": one.version or "OFFLINE",
            "consumeType": one.consume_type,
            "messageModel": one.message_model,
            "consumeTps": one.consume_tps,
            "diffTotal": one.behind,
        }
        for one in overview.groups
    ]
    columns = [
        Column("Group", "group"),
        Column("Count", "count"),
        Column("Version", "version"),
        Column("Type", "consumeType"),
        Column("Model", "messageModel"),
        Column("TPS", "consumeTps"),
        Column("Diff Total", "diffTotal", warns=is_behind),
    ]
    return Answer({"groups": rows}, [Table(columns, rows)], overview.failed)


def _seconds_text(millis: int | None) -> str:
    return "-" if millis is None else f"{millis / 1000:,.0f} s"


@app.command("progress")
@shows
async def show_progress(
    admin: Admin,
    group: Group,
    topic: OneTopic = None,
    clients: Annotated[bool, typer.Option("--clients/--no-clients", help="Show which member has each queue.")] = False,
) -> Answer:
    """Show the offset of a group in every queue, how many messages wait there, and for how long."""
    stats = await admin.groups.progress(group, topic)
    ages = await admin.offsets.ages(group, stats.done)
    owners = await _owners(admin, group) if clients else {}
    rows: list[dict[str, Any]] = [
        {
            "topic": queue.topic,
            **progress_row(queue, offsets),
            "behindMillis": ages.get(queue) if offsets.behind > 0 else None,
            **({"clientId": owners.get(queue)} if clients else {}),
        }
        for queue, offsets in sorted(item for answered in stats.done.values() for item in answered.offset_table.items())
    ]
    columns = [
        Column("Topic", "topic"),
        *PROGRESS_COLUMNS,
        Column("LastTime", "lastTimestamp", lambda millis: time_text(millis) or "N/A"),
        Column("Behind", "behindMillis", _seconds_text, is_behind),
        *([Column("ClientId", "clientId", lambda name: name or "N/A")] if clients else ()),
    ]
    tps = sum(answered.consume_tps for answered in stats.done.values())
    behind = sum(row["diff"] for row in rows)
    document = {"group": group, "queues": rows, "consumeTps": tps, "diffTotal": behind}
    return Answer(document, [Table(columns, rows), f"\nConsume TPS: {tps:.2f}\nDiff Total: {behind}"], stats.failed)


async def _owners(admin: Admin, group: str) -> dict[MessageQueue, str]:
    """The running member that reports each queue; what a member does not report is left out."""
    from downrange.client.per_server import ask_each

    connections = await admin.groups.connections(group)
    members = {member.client_id for one in connections.done.values() if one for member in one.connection_set}
    infos = await ask_each(sorted(members), lambda name: admin.groups.running_info(group, name))
    return {queue: name for name, info in infos.done.items() for queue in info.mq_table}


@app.command("config")
@asks
async def show_config(admin: Admin, group: Group, cluster: Cluster = None, broker: Broker = None) -> Answer:
    """Show the configuration of a group on every broker, and the topics it pops if its members let brokers decide."""
    from downrange.client.admin.groups import to_table
    from downrange.client.errors import GroupNotFound
    from downrange.client.per_server import ask_each

    configs = await admin.groups.configs(cluster, broker)
    found = {one: table[group] for one, table in configs.done.items() if group in table}
    if not found and not configs.failed:
        raise GroupNotFound(f"no broker knows the consumer group {group}")
    modes = await ask_each(found, admin.groups.consume_modes_of)
    mine = {
        one: {mode.topic: mode for mode in all_ if mode.consumer_group == group} for one, all_ in modes.done.items()
    }
    rows = [
        {
            **broker_row(one),
            "config": to_table(config),
            "consumeModes": [
                {"topic": topic, "mode": mode.mode, "popShareQueueNum": mode.pop_share_queue_num}
                for topic, mode in sorted(mine.get(one, {}).items())
            ],
        }
        for one, config in found.items()
    ]
    parts = [
        settings_text(
            str(one),
            to_table(config)
            | {f"consumeMode of {topic}": mode.mode for topic, mode in sorted(mine.get(one, {}).items())},
        )
        for one, config in found.items()
    ]
    return Answer({"group": group, "brokers": rows}, parts, {**configs.failed, **modes.failed})


@app.command("set-consume-mode")
@asks
async def set_consume_mode(
    admin: Admin,
    group: Group,
    topic: Topic,
    mode: Annotated[str, typer.Option("--mode", "-m", help="PULL or POP.")],
    share: Annotated[
        int, typer.Option("--share", "-q", help="POP: members that share each queue besides its owner; 0: all.")
    ] = 0,
    cluster: Cluster = None,
    broker: Broker = None,
) -> Answer:
    """Choose whether a group pulls or pops a topic, if its members let brokers decide (`client_rebalance=False`)."""
    chosen = mode.upper()
    if chosen not in ("PULL", "POP"):
        raise UsageError(f"--mode {mode}: expected PULL or POP")
    done = await admin.groups.set_consume_mode(group, topic, chosen, share=share, cluster=cluster, broker=broker)
    return told(f"group {group} consumes {topic} by {chosen}", done)


@app.command("create")
@asks
async def create(
    admin: Admin,
    group: Group,
    cluster: Cluster = None,
    broker: Broker = None,
    consume: Annotated[bool, typer.Option("--consume/--no-consume", help="May the group consume?")] = True,
    from_min: Annotated[
        bool, typer.Option("--from-min/--no-from-min", help="May the group start at the oldest message?")
    ] = True,
    broadcast: Annotated[bool, typer.Option("--broadcast/--no-broadcast", help="May the group broadcast?")] = True,
    retry_queues: Annotated[int, typer.Option("--retry-queues", min=0, help="Queues of the retry topic.")] = 1,
    retry_max_times: Annotated[
        int, typer.Option("--retry-max-times", min=-1, max=2**31 - 1, help="Retries before a message is a dead letter.")
    ] = 16,
    broker_id: Annotated[int, typer.Option("--broker-id", min=0, help="Broker id to read from.")] = 0,
    slow_broker_id: Annotated[
        int, typer.Option("--slow-broker-id", min=0, help="Broker id to read from when the group is far behind.")
    ] = 1,
    notify: Annotated[
        bool, typer.Option("--notify/--no-notify", help="Tell members when other members come and go.")
    ] = True,
    orderly: Annotated[
        bool, typer.Option("--orderly", help="gRPC clients get the messages of a queue in order.")
    ] = False,
    retry_policy: Annotated[
        str,
        typer.Option("--retry-policy", help="Pauses of gRPC clients between attempts: groupRetryPolicy as JSON."),
    ] = "",
) -> Answer:
    """Create a group, or replace its configuration."""
    from downrange.client.admin.groups import parse_retry_policy
    from downrange.model.topics import SubscriptionGroupConfig

    config = SubscriptionGroupConfig(
        group_name=group,
        consume_enable=consume,
        consume_from_min_enable=from_min,
        consume_broadcast_enable=broadcast,
        retry_queue_nums=retry_queues,
        retry_max_times=retry_max_times,
        broker_id=broker_id,
        which_broker_when_consume_slowly=slow_broker_id,
        notify_consumer_ids_changed_enable=notify,
        consume_message_orderly=orderly or None,
        group_retry_policy=parse_retry_policy(retry_policy),
    )
    return told(f"group {group} created", await admin.groups.create(config, cluster, broker))


@app.command("delete")
@asks
async def delete(
    admin: Admin,
    group: Group,
    cluster: Cluster = None,
    broker: Broker = None,
    offsets: Annotated[bool, typer.Option("--offsets/--keep-offsets", help="Delete the group's offsets, too.")] = False,
    topics: Annotated[
        bool, typer.Option("--topics", help="Delete the group's retry and dead-letter topics, too.")
    ] = False,
) -> Answer:
    """Delete a group."""
    from downrange.client.errors import NoRoute
    from downrange.model.topics import dlq_topic, retry_topic

    if not offsets:  # offsets may be left of a group that was deleted before
        await admin.groups.brokers_of(group)
    outcomes = await admin.groups.delete(group, cluster, broker, remove_offsets=offsets)
    failed: dict[Any, MQError] = {**outcomes.failed}
    deleted = []
    for topic in (retry_topic(group), dlq_topic(group)) if topics and not failed else ():
        try:
            deletion = await admin.topics.delete(topic)
        except NoRoute:
            continue  # the group never needed this topic
        deleted.append(topic)
        failed.update(deletion.brokers.failed)
        failed.update(deletion.namesrvs.failed)
    document = {"done": [broker_row(one) for one in outcomes.done], "topics": deleted}
    lines = [f"group {group} deleted on {one}" for one in outcomes.done]
    return Answer(document, [*lines, *(f"topic {topic} deleted" for topic in deleted)], failed)
