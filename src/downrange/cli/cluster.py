"""`downrange cluster …`: the brokers of a cluster, their statistics and their housekeeping."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from downrange.cli.asking import answer, broker_row
from downrange.cli.options import Broker, Cluster, Json, Namesrv, command_family
from downrange.cli.output import Answer, Column, Table
from downrange.cli.times import time_text

if TYPE_CHECKING:
    from downrange.client.admin import Admin
    from downrange.client.brokers import Broker as BrokerProcess
    from downrange.client.outcomes import Outcomes

app = command_family("Brokers of a cluster: list, look at, clean up.")


@app.command("list")
def list_brokers(
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Only this cluster.")] = None,
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """List every broker with its load."""

    async def action(admin: Admin) -> Answer:
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
                "in": f"{_rate(row['inTps'])}({row['sendQueueSize']},{row['sendQueueWaitMillis']}ms)",
                "out": f"{_rate(row['outTps'])}({row['pullQueueSize']},{row['pullQueueWaitMillis']}ms)",
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

    answer(namesrv, json, action)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@app.command("stats")
def show_stats(
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Only this cluster.")] = None,
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """Show messages in and out of every broker, yesterday and today."""

    async def action(admin: Admin) -> Answer:
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

    answer(namesrv, json, action)


@app.command("broker-status")
def show_broker_status(
    broker: Broker = None,
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="Every broker of this cluster.")] = None,
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """Show every figure that a broker reports about itself."""

    async def action(admin: Admin) -> Answer:
        status = await admin.cluster.broker_status(cluster, broker)
        rows = [
            {**broker_row(one), "table": dict(sorted(runtime.table.items()))} for one, runtime in status.done.items()
        ]
        parts = [
            "\n".join(
                (f"{one}:" if broker is None else "") + f"{key:<32}: {value}"
                for key, value in sorted(runtime.table.items())
            )
            for one, runtime in status.done.items()
        ]
        return Answer({"brokers": rows}, parts, status.failed)

    answer(namesrv, json, action)


@app.command("consume-stats")
def show_consume_stats(
    broker: Annotated[str, typer.Argument(help="Broker: its name or host:port.")],
    order: Annotated[bool, typer.Option("--order/--no-order", "-o", help="Only ordered topics.")] = False,
    namesrv: Namesrv = None,
    json: Json = False,
) -> None:
    """Show how far every consumer group is on one broker."""

    async def action(admin: Admin) -> Answer:
        listed = await admin.cluster.consume_stats(broker, is_order=order)
        rows = [
            {
                "topic": queue.topic,
                "group": group,
                "broker": queue.broker_name,
                "queueId": queue.queue_id,
                "brokerOffset": offsets.broker_offset,
                "consumerOffset": offsets.consumer_offset,
                "diff": offsets.behind,
                "lastTimestamp": offsets.last_timestamp,
            }
            for by_group in listed.consume_stats_list
            for group, stats in sorted(by_group.items())
            for one in stats
            for queue, offsets in sorted(one.offset_table.items())
        ]
        columns = [
            Column("Topic", "topic"),
            Column("Group", "group"),
            Column("Broker Name", "broker"),
            Column("QID", "queueId"),
            Column("Broker Offset", "brokerOffset"),
            Column("Consumer Offset", "consumerOffset"),
            Column("Diff", "diff"),
            Column("LastTime", "lastTimestamp", time_text),
        ]
        document = {"broker": broker, "queues": rows, "diffTotal": listed.total_diff}
        return Answer(document, [Table(columns, rows), f"\nDiff Total: {listed.total_diff}"])

    answer(namesrv, json, action)


@app.command("producers")
def show_producers(broker: Broker = None, cluster: Cluster = None, namesrv: Namesrv = None, json: Json = False) -> None:
    """List every producer connected to brokers."""

    async def action(admin: Admin) -> Answer:
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

    answer(namesrv, json, action)


def told(what: str, outcomes: Outcomes[BrokerProcess, None]) -> Answer:
    """The answer to an order that brokers just carry out."""
    document: dict[str, Any] = {"done": [broker_row(one) for one in outcomes.done]}
    return Answer(document, [f"{what} on {one}" for one in outcomes.done], outcomes.failed)


@app.command("clean-queues")
def clean_queues(broker: Broker = None, cluster: Cluster = None, namesrv: Namesrv = None, json: Json = False) -> None:
    """Delete consume-queue files whose messages are gone."""

    async def action(admin: Admin) -> Answer:
        return told("expired consume queues cleaned", await admin.cluster.clean_expired_queues(cluster, broker))

    answer(namesrv, json, action)


@app.command("clean-topics")
def clean_topics(broker: Broker = None, cluster: Cluster = None, namesrv: Namesrv = None, json: Json = False) -> None:
    """Delete queues of topics that no longer exist."""

    async def action(admin: Admin) -> Answer:
        return told("unused topics cleaned", await admin.cluster.clean_unused_topics(cluster, broker))

    answer(namesrv, json, action)


@app.command("delete-expired-log")
def delete_expired_log(
    broker: Broker = None, cluster: Cluster = None, namesrv: Namesrv = None, json: Json = False
) -> None:
    """Delete commit-log files past their time now instead of at the configured hour."""

    async def action(admin: Admin) -> Answer:
        return told("expired commit log deleted", await admin.cluster.delete_expired_commit_log(cluster, broker))

    answer(namesrv, json, action)
