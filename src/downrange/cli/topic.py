"""`downrange topic …`: topics of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.options import Broker, Cluster, Topic, UsageError, command_family, parse_perm, perm_text
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import time_text
from downrange.model.topics import REPLY_TOPIC_SUFFIX, is_system_topic

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker as BrokerProcess
    from downrange.model.topics import TopicConfig

app = command_family("List topics, look at them, create, change and delete them.")

Perm = Annotated[str | None, typer.Option("--perm", "-p", help="2 write, 4 read, 6 both.")]
ReadQueues = Annotated[int | None, typer.Option("--read-queues", "-r", min=0, max=65535, help="Queues to read from.")]
MessageType = Annotated[
    str | None,
    typer.Option(
        "--type", help="Kind of its messages: normal, fifo, delay, transaction or mixed; gRPC clients obey it."
    ),
]
WriteQueues = Annotated[int | None, typer.Option("--write-queues", "-w", min=0, max=65535, help="Queues to write to.")]


@app.command("list")
@shows
async def list_topics(
    admin: Admin,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Only topics of this cluster.")] = None,
    groups: Annotated[bool, typer.Option("--groups", help="Show cluster and consumer groups of each topic.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="List the topics that brokers and pipelines keep for themselves, too.")
    ] = False,
) -> Answer:
    """List topics."""
    names = await admin.topics.names(cluster)
    if not every:
        own = await _kept_topics(admin)
        names = tuple(one for one in names if one not in own and not is_system_topic(one))
    if not groups:
        return Answer({"topics": list(names)}, ["\n".join(names)] if names else [])
    rows: list[dict[str, Any]] = []
    failed = {}
    for topic in names:
        found = await admin.topics.groups(topic)
        failed.update(found.failed)
        rows.append(
            {
                "topic": topic,
                "clusters": sorted({broker.cluster for broker in (*found.done, *found.failed)}),
                "groups": sorted({group for listed in found.done.values() for group in listed}),
            }
        )
    columns = [Column("Cluster Name", "clusters"), Column("Topic", "topic"), Column("Consumer Group", "groups")]
    return Answer({"topics": rows}, [Table(columns, rows)], failed)


async def _kept_topics(admin: Admin) -> set[str]:
    """The topics that brokers make for themselves, named after brokers and clusters, and the topic of pipelines."""
    from downrange.client.pipeline_status import PIPELINES_TOPIC

    masters = await admin.session.masters()
    clusters = {one.cluster for one in masters}
    replies = {cluster + REPLY_TOPIC_SUFFIX for cluster in clusters}
    return {PIPELINES_TOPIC, *(one.name for one in masters), *clusters, *replies}


@app.command("route")
@shows
async def show_route(admin: Admin, topic: Topic) -> Answer:
    """Show which brokers serve a topic."""
    route = await admin.topics.route(topic)
    brokers = {data.broker_name: data for data in route.broker_datas}
    rows = [
        {
            "cluster": brokers[queues.broker_name].cluster,
            "broker": queues.broker_name,
            "addresses": {
                str(number): text for number, text in sorted(brokers[queues.broker_name].broker_addrs.items())
            },
            "readQueueNums": queues.read_queue_nums,
            "writeQueueNums": queues.write_queue_nums,
            "perm": queues.perm,
            "topicSysFlag": queues.topic_sys_flag,
        }
        for queues in sorted(route.queue_datas, key=lambda data: data.broker_name)
        if queues.broker_name in brokers
    ]
    columns = [
        Column("Cluster Name", "cluster"),
        Column("Broker Name", "broker"),
        Column("Addr", "addresses", lambda table: " ".join(f"{number}={text}" for number, text in table.items())),
        Column("Read Queues", "readQueueNums"),
        Column("Write Queues", "writeQueueNums"),
        Column("Perm", "perm", perm_text),
    ]
    document = {"topic": topic, "orderTopicConf": route.order_topic_conf, "brokers": rows}
    return Answer(document, [Table(columns, rows)])


@app.command("status")
@shows
async def show_status(admin: Admin, topic: Topic) -> Answer:
    """Show the offsets of every queue of a topic."""
    stats = await admin.topics.status(topic)
    rows = [
        {
            "broker": queue.broker_name,
            "queueId": queue.queue_id,
            "minOffset": reach.min_offset,
            "maxOffset": reach.max_offset,
            "lastUpdateTimestamp": reach.last_update_timestamp,
        }
        for answered in stats.done.values()
        for queue, reach in sorted(answered.offset_table.items())
    ]
    columns = [
        Column("Broker Name", "broker"),
        Column("QID", "queueId"),
        Column("Min Offset", "minOffset"),
        Column("Max Offset", "maxOffset"),
        Column("Last Updated", "lastUpdateTimestamp", time_text),
    ]
    return Answer({"topic": topic, "queues": rows}, [Table(columns, rows)], stats.failed)


@app.command("clusters")
@shows
async def show_clusters(admin: Admin, topic: Topic) -> Answer:
    """List the clusters that serve a topic."""
    clusters = await admin.topics.clusters(topic)
    return Answer({"topic": topic, "clusters": clusters}, ["\n".join(clusters)])


@app.command("create")
@asks
async def create(
    admin: Admin,
    topic: Topic,
    cluster: Cluster = None,
    broker: Broker = None,
    queues: Annotated[int, typer.Option("--queues", "-q", min=0, max=65535, help="Queues to read and write.")] = 8,
    read_queues: ReadQueues = None,
    write_queues: WriteQueues = None,
    perm: Perm = "6",
    order: Annotated[bool, typer.Option("--order/--no-order", "-o", help="Keep the number of queues fixed.")] = False,
    message_type: MessageType = None,
    unit: Annotated[bool, typer.Option("--unit/--no-unit", help="Mark the topic as a topic of one unit.")] = False,
    unit_sub: Annotated[
        bool, typer.Option("--unit-sub/--no-unit-sub", help="Mark the topic as one that groups of units subscribe to.")
    ] = False,
) -> Answer:
    """Create a topic, or replace its configuration. --cluster or --broker is needed if there are several clusters."""
    from downrange.model.topics import MESSAGE_TYPE, UNIT_FLAG, UNIT_SUB_FLAG, TopicConfig

    bits = parse_perm(perm or "6")
    reads, writes = (queues if given is None else given for given in (read_queues, write_queues))
    attributes = None if message_type is None else {MESSAGE_TYPE: message_type.upper()}
    flag = UNIT_FLAG * unit | UNIT_SUB_FLAG * unit_sub
    config = TopicConfig(topic, reads, writes, bits, topic_sys_flag=flag, order=order, attributes=attributes)
    outcomes = await admin.topics.create(config, cluster, broker)
    rows = [{**_config_row(one, config), "order": config.order} for one in outcomes.done]
    return Answer({"created": rows}, [Table(_CONFIG_COLUMNS, rows)] if rows else [], outcomes.failed)


def _config_row(broker: BrokerProcess, config: TopicConfig) -> dict[str, Any]:
    return {
        **broker_row(broker),
        "topic": config.topic_name,
        "readQueueNums": config.read_queue_nums,
        "writeQueueNums": config.write_queue_nums,
        "perm": config.perm,
    }


_CONFIG_COLUMNS = [
    Column("Broker Name", "broker"),
    Column("Addr", "address"),
    Column("Topic", "topic"),
    Column("Read Queues", "readQueueNums"),
    Column("Write Queues", "writeQueueNums"),
    Column("Perm", "perm", perm_text),
]


async def update(
    admin: Admin,
    topic: Topic,
    cluster: Cluster = None,
    broker: Broker = None,
    read_queues: ReadQueues = None,
    write_queues: WriteQueues = None,
    perm: Perm = None,
) -> Answer:
    """Change some settings of an existing topic and keep the others."""
    if read_queues is None and write_queues is None and perm is None:
        raise UsageError("nothing to change: give --read-queues, --write-queues or --perm")
    bits = None if perm is None else parse_perm(perm)
    outcomes = await admin.topics.update(
        topic, read_queues=read_queues, write_queues=write_queues, perm=bits, cluster=cluster, broker=broker
    )
    rows = [
        {**_config_row(one, change.after), "permBefore": change.before.perm} for one, change in outcomes.done.items()
    ]
    columns = [*_CONFIG_COLUMNS, Column("Perm Before", "permBefore", perm_text)]
    return Answer({"updated": rows}, [Table(columns, rows)] if rows else [], outcomes.failed)


app.command("update")(asks(update))


@app.command("perm")
@asks
async def set_perm(
    admin: Admin,
    topic: Topic,
    perm: Annotated[str, typer.Argument(help="2 write, 4 read, 6 both.")],
    cluster: Cluster = None,
    broker: Broker = None,
) -> Answer:
    """Change the permission of a topic."""
    return await update(admin, topic, cluster, broker, perm=perm)


@app.command("delete")
@asks
async def delete(
    admin: Admin,
    topic: Topic,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Only from this cluster.")] = None,
) -> Answer:
    """Delete a topic from its brokers, then from the name servers."""
    deletion = await admin.topics.delete(topic, cluster)
    lines = [f"deleted {topic} from broker {one}" for one in deletion.brokers.done]
    lines += [f"deleted {topic} from name server {one}" for one in deletion.namesrvs.done]
    document = {
        "topic": topic,
        "brokers": [broker_row(one) for one in deletion.brokers.done],
        "namesrvs": list(deletion.namesrvs.done),
    }
    return Answer(document, lines, {**deletion.brokers.failed, **deletion.namesrvs.failed})


@app.command("stats")
@shows
async def show_stats(
    admin: Admin,
    topic: Annotated[str | None, typer.Argument(help="One topic. [all topics of users]")] = None,
    active: Annotated[
        bool, typer.Option("--active", "-a", help="Only topics with traffic in the last 24 hours.")
    ] = False,
) -> Answer:
    """Show how many messages go into topics and how many each group takes out."""
    from downrange.client.admin.topics import is_user_topic

    names = [topic] if topic is not None else [name for name in await admin.topics.names() if is_user_topic(name)]
    rows: list[dict[str, Any]] = []
    failed = {}
    for name in names:
        report = await admin.topics.traffic(name)
        failed.update(report.failed)
        rows += [
            {
                "topic": row.topic,
                "group": row.group,
                "accumulation": row.accumulation,
                "inTps": row.in_tps,
                "outTps": row.out_tps,
                "inMsg24Hour": row.in_24_hours,
                "outMsg24Hour": row.out_24_hours,
            }
            for row in report.rows
            if not active or row.in_24_hours or row.out_24_hours
        ]
    columns = [
        Column("Topic", "topic"),
        Column("Consumer Group", "group"),
        Column("Accumulation", "accumulation"),
        Column("InTPS", "inTps"),
        Column("OutTPS", "outTps"),
        Column("InMsg24Hour", "inMsg24Hour"),
        Column("OutMsg24Hour", "outMsg24Hour"),
    ]
    return Answer({"topics": rows}, [Table(columns, rows)], failed)
