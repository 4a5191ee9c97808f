"""`downrange cluster …`: the brokers of a cluster, their statistics and their housekeeping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.cluster_actions import asks, broker_row, shows
from downrange.cli.options import Broker, Cluster, command_family
from downrange.cli.output import Answer, Column, Table, cell, is_behind
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker as BrokerProcess
    from downrange.client.per_server import PerServer
    from downrange.model.message import MessageQueue

app = command_family("List the brokers of a cluster, look at them, clean them up.")

OneCluster = Annotated[str | None, typer.Option("--cluster", "-c", help="Only this cluster.")]
PROGRESS_COLUMNS = [
    Column("Broker Name", "broker"),
    Column("QID", "queueId"),
    Column("Broker Offset", "brokerOffset"),
    Column("Consumer Offset", "consumerOffset"),
    Column("Diff", "diff", warns=is_behind),
]


def progress_row(queue: MessageQueue, offsets: Any) -> dict[str, Any]:
    """How far a group is in a queue."""
    return {
        "broker": queue.broker_name,
        "queueId": queue.queue_id,
        "brokerOffset": offsets.broker_offset,
        "consumerOffset": offsets.consumer_offset,
        "diff": offsets.behind,
        "lastTimestamp": offsets.last_timestamp,
    }


@app.command("list")
@shows
async def list_brokers(admin: Admin, cluster: OneCluster = None) -> Answer:
    """List every broker with its load."""
    status = await admin.cluster.status(cluster)
    now = time.time() * 1000
    rows: list[dict[str, Any]] = []
    for broker, runtime in status.done.items():
        oldest = runtime.earliest_message_timestamp
        rows.append(
            {
                "cluster": broker.cluster,
                **broker_row(broker),
                "brokerId": broker.broker_id,
                "version": runtime.version,
                "inTps": runtime.in_tps,
                "outTps": runtime.out_tps,
                "sendQueueSize": runtime.send_queue_size,
                "sendQueueWaitMillis": runtime.send_queue_wait_millis,
                "pullQueueSize": runtime.pull_queue_size,
                "pullQueueWaitMillis": runtime.pull_queue_wait_millis,
                "pageCacheLockMillis": runtime.page_cache_lock_millis,
                "hours": None if oldest is None else round((now - oldest) / 3_600_000, 2),
                "diskRatio": runtime.disk_ratio,
            }
        )
    shown = [
        {
            **row,
            "in": f"{cell(row['inTps'])}({row['sendQueueSize']},{row['sendQueueWaitMillis']}ms)",
            "out": f"{cell(row['outTps'])}({row['pullQueueSize']},{row['pullQueueWaitMillis']}ms)",
        }
        for row in rows
    ]
    columns = [
        Column("Cluster Name", "cluster"),
        Column("Broker Name", "broker"),
        Column("BID", "brokerId"),
        Column("Addr", "address"),
        Column("Version", "version"),
        Column("InTPS(LOAD)", "in"),
        Column("OutTPS(LOAD)", "out"),
        Column("PCWait(ms)", "pageCacheLockMillis"),
        Column("Hour", "hours"),
        Column("SPACE", "diskRatio"),
    ]
    return Answer({"brokers": rows}, [Table(columns, shown)], status.failed)


@app.command("stats")
@shows
async def show_stats(admin: Admin, cluster: OneCluster = None) -> Answer:
    """Show how many messages went into and out of every broker, yesterday and today."""
    status = await admin.cluster.status(cluster)
    rows = [
        {
            "cluster": broker.cluster,
            **broker_row(broker),
            "brokerId": broker.broker_id,
            "inYesterday": runtime.in_yesterday,
            "outYesterday": runtime.out_yesterday,
            "inToday": runtime.in_today,
            "outToday": runtime.out_today,
        }
        for broker, runtime in status.done.items()
    ]
    columns = [
        Column("Cluster Name", "cluster"),
        Column("Broker Name", "broker"),
        Column("BID", "brokerId"),
        Column("InTotalYest", "inYesterday"),
        Column("OutTotalYest", "outYesterday"),
        Column("InTotalToday", "inToday"),
        Column("OutTotalToday", "outToday"),
    ]
    return Answer({"brokers": rows}, [Table(columns, rows)], status.failed)


@app.command("broker-status")
@shows
async def show_broker_status(
    admin: Admin,
    broker: Broker = None,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Every broker of this cluster.")] = None,
) -> Answer:
    """Show every figure that a broker reports about itself."""
    status = await admin.cluster.broker_status(cluster, broker)
    rows = [{**broker_row(one), "table": dict(sorted(runtime.table.items()))} for one, runtime in status.done.items()]
    parts = [
        "\n".join(
            (f"{one}:" if broker is None else "") + f"{key:<32}: {value}"
            for key, value in sorted(runtime.table.items())
        )
        for one, runtime in status.done.items()
    ]
    return Answer({"brokers": rows}, parts, status.failed)


@app.command("consume-stats")
@shows
async def show_consume_stats(
    admin: Admin,
    broker: Annotated[str, typer.Argument(help="Broker: its name or host:port.")],
    order: Annotated[bool, typer.Option("--order/--no-order", "-o", help="Only ordered topics.")] = False,
    level: Annotated[
        int, typer.Option("--level", "-l", min=0, help="Only queues with at least this many waiting messages.")
    ] = 0,
) -> Answer:
    """Show how far every consumer group is on one broker."""
    listed = await admin.cluster.consume_stats(broker, is_order=order)
    rows = [
        {
            "topic": queue.topic,
            "group": group,
            **progress_row(queue, offsets),
        }
        for by_group in listed.consume_stats_list
        for group, stats in sorted(by_group.items())
        for one in stats
        for queue, offsets in sorted(one.offset_table.items())
        if offsets.broker_offset - offsets.consumer_offset >= level
    ]
    columns = [
        Column("Topic", "topic"),
        Column("Group", "group"),
        *PROGRESS_COLUMNS,
        Column("LastTime", "lastTimestamp", time_text),
    ]
    document = {"broker": broker, "queues": rows, "diffTotal": listed.total_diff}
    return Answer(document, [Table(columns, rows), f"\nDiff Total: {listed.total_diff}"])


@app.command("producers")
@shows
async def show_producers(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """List every producer connected to brokers."""
    producers = await admin.cluster.producers(cluster, broker)
    rows = [
        {
            **broker_row(one),
            "group": group,
            "clientId": info.client_id,
            "remoteIP": info.remote_ip,
            "language": info.language,
            "version": info.version,
            "lastUpdateTimestamp": info.last_update_timestamp,
        }
        for one, table in producers.done.items()
        for group, infos in sorted(table.data.items())
        for info in infos
    ]
    columns = [
        Column("Addr", "address"),
        Column("Group", "group"),
        Column("ClientId", "clientId"),
        Column("RemoteIP", "remoteIP"),
        Column("Language", "language"),
        Column("Version", "version"),
        Column("Last Heartbeat", "lastUpdateTimestamp", time_text),
    ]
    return Answer({"producers": rows}, [Table(columns, rows)], producers.failed)


def told(what: str, outcomes: PerServer[BrokerProcess, None]) -> Answer:
    """The answer to an order that brokers just carry out."""
    document: dict[str, Any] = {"done": [broker_row(one) for one in outcomes.done]}
    return Answer(document, [f"{what} on {one}" for one in outcomes.done], outcomes.failed)


@app.command("clean-queues")
@asks
async def clean_queues(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Delete consume-queue files whose messages are gone."""
    return told("expired consume queues cleaned", await admin.cluster.clean_expired_queues(cluster, broker))


@app.command("clean-topics")
@asks
async def clean_topics(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Delete queues of topics that no longer exist."""
    return told("unused topics cleaned", await admin.cluster.clean_unused_topics(cluster, broker))


@app.command("delete-expired-log")
@asks
async def delete_expired_log(admin: Admin, broker: Broker = None, cluster: Cluster = None) -> Answer:
    """Delete expired commit-log files now, not at the configured hour."""
    return told("expired commit log deleted", await admin.cluster.delete_expired_commit_log(cluster, broker))
